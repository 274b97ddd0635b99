"""Data shipped with the package.

``kernel.npy`` is the second layer (16 to 16 channels, 3×3, float32) of a small convolutional network that this project
trained on scikit-learn's 8×8 handwritten digits, to 97 % test accuracy.

``network.safetensors`` is the 1-Lipschitz network that ``gramcert train digits --set dense_inner=96`` makes of the same
images; `gramcert audit` takes it where no model is named.
"""

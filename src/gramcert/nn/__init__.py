"""1-Lipschitz layers, activations, pooling, heads and losses, and their export to plain torch layers."""

from torch.nn import Flatten

from gramcert.nn.activations import Abs, GroupSort, Householder, MaxMin
from gramcert.nn.baking import export
from gramcert.nn.combining import Concatenation, Residual
from gramcert.nn.dense import SRConv1d, SRConv2d, SRConv3d, SRLinear
from gramcert.nn.head import NormalizedLinear
from gramcert.nn.losses import HingeMargin, LogitAnnealing, OffsetCrossEntropy, margins
from gramcert.nn.pooling import ScaledAvgPool, ScaledL2NormPool, Subsample
from gramcert.nn.residual import SLLConv1d, SLLConv2d, SLLConv3d, SLLLinear, together
from gramcert.nn.shaping import BatchCentering, LayerCentering, PadChannels, Shift

__all__ = [
    "Abs",
    "BatchCentering",
    "Concatenation",
    "Flatten",
    "GroupSort",
    "HingeMargin",
    "Householder",
    "LayerCentering",
    "LogitAnnealing",
    "MaxMin",
    "NormalizedLinear",
    "OffsetCrossEntropy",
    "PadChannels",
    "Residual",
    "SLLConv1d",
    "SLLConv2d",
    "SLLConv3d",
    "SLLLinear",
    "SRConv1d",
    "SRConv2d",
    "SRConv3d",
    "SRLinear",
    "ScaledAvgPool",
    "ScaledL2NormPool",
    "Shift",
    "Subsample",
    "export",
    "margins",
    "together",
]

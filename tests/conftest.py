import os

import hypothesis

# Timings vary too much for deadlines. The usual run draws the same layers every time; `make test-slow` draws new ones.
hypothesis.settings.register_profile("usual", deadline=None, derandomize=True, max_examples=80)
hypothesis.settings.register_profile("slow", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))

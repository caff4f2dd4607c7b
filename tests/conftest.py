# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: one torch thread, and the same examples each time in CI."""

import os

import torch
from hypothesis import settings

# Two test workers share two cores, and sums over several threads differ between machines.
torch.set_num_threads(1)

# No deadline: the first call of a numba kernel compiles it.
settings.register_profile("trellisbank", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("trellisbank")

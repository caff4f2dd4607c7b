# SPDX-License-Identifier: Apache-2.0
"""One page that says what was built from what, what it lost, and what to worry about."""

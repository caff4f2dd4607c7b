# SPDX-License-Identifier: Apache-2.0
"""Who made what from what: digests of code, records of jobs."""

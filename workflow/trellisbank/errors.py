# SPDX-License-Identifier: Apache-2.0
"""The project's exception classes, one for each kind of trouble.

Every message says what is wrong and, as far as it is known, where (file, tensor, layer, expert),
what was expected, what was found and how to mend it.
"""

from __future__ import annotations

import os
from typing import Self


class TrellisbankError(Exception):
    """Base of every error that the user can do something about (exit code 1 on a command line).

    Args:
        what: One sentence that names the trouble.
        file: File or folder concerned.
        tensor: Tensor or module concerned.
        key: Configuration key concerned.
        layer: Body layer, counted from 0.
        expert: Routed expert, counted from 0.
        expected: What a good input holds here.
        found: What this input holds.
        fix: What the user can do next.
    """

    def __init__(
        self,
        what: str,
        *,
        file: str | os.PathLike[str] | None = None,
        tensor: str | None = None,
        key: str | None = None,
        layer: int | None = None,
        expert: int | None = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        """Keep the fields and build the message from those that are given."""
        self.what = what
        fields = {
            "file": None if file is None else os.fspath(file),
            "tensor": tensor,
            "key": key,
            "layer": layer,
            "expert": expert,
            "expected": expected,
            "found": found,
            "fix": fix,
        }
        self.fields = {name: value for name, value in fields.items() if value is not None}
        super().__init__(
            "\n".join([what] + [f"  {name}: {value}" for name, value in self.fields.items()])
        )

    def located(self, file: str | os.PathLike[str], tensor: str) -> Self:
        """Return the same error with the place that its raiser could not know."""
        fields = {k: v for k, v in self.fields.items() if k not in ("file", "tensor")}
        return type(self)(self.what, file=file, tensor=tensor, **fields)  # type: ignore[arg-type]


class CheckpointError(TrellisbankError):
    """A source or release folder that cannot be read as one."""


class FormatError(TrellisbankError):
    """Stored bytes that do not follow their number format."""


class ConfigError(TrellisbankError):
    """A workflow configuration that cannot be used."""


class ForwardError(TrellisbankError):
    """Rows or states that the forward pass cannot take."""


class GateError(TrellisbankError):
    """A measured figure that does not keep to what the configuration asks for."""


class QuantizeError(TrellisbankError):
    """Weights that cannot be encoded."""


class PlanError(TrellisbankError):
    """A budget that cannot be met, or a plan that does not fit its inputs."""


class ReleaseError(TrellisbankError):
    """A release that cannot be made or does not hold what it states."""


class CertificateError(TrellisbankError):
    """A certificate that does not hold what it states."""


class AuditError(TrellisbankError):
    """A chain of records that does not hold together."""


class ReportError(TrellisbankError):
    """Files of a run that do not make one report."""

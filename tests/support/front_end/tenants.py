"""Keys files, and an admission without HTTP and without an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from blinkpy.dpu.admission.admission import Admission
from blinkpy.dpu.admission.admission_options import AdmissionOptions
from blinkpy.dpu.admission.keys_file import KeysFile
from blinkpy.dpu.admission.tenant_table import TenantTable
from blinkpy.dpu.metrics import Metrics

SECRET = bytes(range(32))


def write_keys(path: Path, **tenants: dict[str, Any]) -> Path:
    """Write a keys file. tenants: fields of each; a tenant without `key` gets "key-of-NAME"."""
    lines = []
    for name, fields in tenants.items():
        lines.append(f"[{name}]")
        given = fields if {"key", "sha256"} & set(fields) else {"key": f"key-of-{name}", **fields}
        shown = {True: "true", False: "false"}
        lines += [f"{field} = {shown[value] if isinstance(value, bool) else repr(value)}" for field, value in given.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def bearer(name: str) -> dict[str, str]:
    """The header with a tenant's key, as write_keys makes it."""
    return {"authorization": f"Bearer key-of-{name}"}


def make_admission(
    path: Path | str, free_slots: Callable[[], int], clock: Callable[[], float], table: TenantTable | None = None, **options: Any
) -> Admission:
    """The admission of a worker with a keys file ("": no file)."""
    keys = KeysFile(str(path), "", False, SECRET)
    return Admission(AdmissionOptions(**options), keys, table or TenantTable(), Metrics(), free_slots, clock)

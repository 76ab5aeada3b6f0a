"""The file of --api-keys: a TOML table for each tenant. Nothing here shows a key, or what might be one, to anybody.

    [research]
    key = "..."                     # or sha256 = "..."; a list of several, while a key is replaced by another
    weight = 2

docs/operate.md explains the fields.
"""

import hashlib
import hmac
import os
import re
import secrets
import tomllib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from blinkpy.config import Config, ConfigError, meant
from blinkpy.dpu.admission.admission_options import AdmissionOptions
from blinkpy.dpu.admission.service_tiers import TIERS
from blinkpy.dpu.admission.tenant import Tenant
from blinkpy.queues.request_parameters import INT32_MAX, INT32_RANGE

MOST_TENANTS = 500
MOST_BYTES = 1 << 20  # of the file
KEYS_OF_ONE = 8
ONE_KEY = "default"  # the tenant of --api-key

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(r"[!-~]{1,512}")
_ONE_KEY = re.compile(r"[^\x00-\x20\x7f\ud800-\udfff]+(?: +[^\x00-\x20\x7f\ud800-\udfff]+)*")  # in UTF-8
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class KeyRing:
    """The tenants, and whose key is whose. digests: SHA-256 of each key."""

    def __init__(self, digests: Mapping[bytes, Tenant]):
        self._secret = secrets.token_bytes(32)  # whoever measures how long a search takes learns nothing of a key from it
        self._tenants = {self._blind(digest): tenant for digest, tenant in digests.items()}
        self.tenants = {tenant.name: tenant for tenant in digests.values()}

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def find(self, key: bytes) -> Tenant | None:
        """Whose key it is."""
        return self._tenants.get(self._blind(hashlib.sha256(key).digest()))


def read_keys(path: str, api_key: str, share_prefixes: bool = False, secret: bytes = b"") -> KeyRing:
    """The keys of a file ("": none), and api_key ("": none), which is that of one tenant without limits. secret: of the server,
    for the salts. Raises ConfigError, with file, tenant and reason."""
    digests: dict[bytes, Tenant] = {}
    if path:
        for name, table in _tables(path).items():
            try:
                for digest, tenant in _entry(name, table, share_prefixes, secret):
                    if digest in digests:
                        raise ConfigError(f"has a key of {digests[digest].name} too")
                    digests[digest] = tenant
            except ConfigError as error:
                raise ConfigError(f"{path}: {name}: {error}") from None
    if api_key:
        if not _ONE_KEY.fullmatch(api_key):  # a line end behind it, perhaps: no client could send it
            raise ConfigError("api_key must be what a header can bring: no control characters, and no spaces around it")
        # Alone, it needs no salt: there is nobody to guess at.
        salt = _salt(ONE_KEY, secret) if path and not share_prefixes else b""
        digest = hashlib.sha256(api_key.encode()).digest()
        if digest in digests:
            raise ConfigError(f"{path}: {digests[digest].name}: has the key of --api-key")
        if any(tenant.name == ONE_KEY for tenant in digests.values()):
            raise ConfigError(f"{path}: {ONE_KEY}: is the name of the tenant of --api-key")
        digests[digest] = Tenant(ONE_KEY, _number(ONE_KEY), salt=salt)
    numbers: dict[int, str] = {}
    for tenant in {tenant.name: tenant for tenant in digests.values()}.values():
        other = numbers.setdefault(tenant.number, tenant.name)
        if other != tenant.name:
            raise ConfigError(
                f"{path}: {tenant.name}: has the number {tenant.number} of {other}: give one of them another `number`"
            )
    return KeyRing(digests)


def _tables(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES} bytes")
        tables = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is no UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at [^)]*\)$", str(error))  # the rest of the message may quote the file
        raise ConfigError(f"{path} is not TOML {where[0] if where else ''}".rstrip()) from None
    if not 1 <= len(tables) <= MOST_TENANTS:
        raise ConfigError(f"{path} has {len(tables)} tenants; it must have 1 to {MOST_TENANTS}")
    for place, (name, table) in enumerate(tables.items(), 1):
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: entry {place} is no table: a tenant begins with [NAME]")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{path}: the name of tenant {place} must be 1 to 64 letters, digits and _ . -")
    return tables


# ---- one tenant ---------------------------------------------------------------------------------------------------------


def _entry(name: str, table: dict[str, Any], share_prefixes: bool, secret: bytes) -> list[tuple[bytes, Tenant]]:
    for field in table:
        if field not in FIELDS:
            raise ConfigError(f"has a field that there is not{meant(field, FIELDS)}; there are {', '.join(FIELDS)}")
    values = {field: FIELDS[field](field, value) for field, value in table.items()}
    digests = [*values.pop("key", ()), *values.pop("sha256", ())]
    if not 1 <= len(digests) <= KEYS_OF_ONE:
        raise ConfigError(f"needs 1 to {KEYS_OF_ONE} keys, as `key` or `sha256`")
    if len(set(digests)) < len(digests):
        raise ConfigError("has a key twice")
    shares = values.pop("share_prefixes", share_prefixes)
    given = {"number": _number(name), "priorities": None, "by_priority": "priorities" in values, **values}
    tiers = values.get("service_tiers", tuple(TIERS))
    given.setdefault("service_tier", tiers[0])
    if given["service_tier"] not in tiers:
        raise ConfigError("service_tier must be one of service_tiers")
    given["salt"] = b"" if shares else _salt(name, secret)
    return [(digest, Tenant(name, **given)) for digest in digests]


def _number(name: str) -> int:
    """Of a tenant that has none in the file: the same in all workers, and after each change of the file."""
    return zlib.crc32(name.encode()) % INT32_MAX + 1


def _salt(name: str, secret: bytes) -> bytes:
    return hmac.digest(secret, name.encode(), "sha256")


def _digests(pattern: re.Pattern[str], form: str, digest_of: Callable[[str], bytes]) -> Callable[[str, Any], list[bytes]]:
    def read(field: str, value: Any) -> list[bytes]:
        given = value if isinstance(value, list) else [value]
        if not all(isinstance(one, str) and pattern.fullmatch(one) for one in given):
            raise ConfigError(f"{field} must be {form}, or a list of these")
        return [digest_of(one) for one in given]

    return read


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def read(field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{field} must be an integer, {low} to {high}")
        return value

    return read


def _weight(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 1000:
        raise ConfigError(f"{field} must be a number, 0.01 to 1000")
    return float(value)


def _priorities(field: str, value: Any) -> tuple[int, int]:
    whole = isinstance(value, list) and len(value) == 2 and all(type(one) is int for one in value)
    if not whole or not INT32_RANGE[0] <= value[0] <= value[1] <= INT32_RANGE[1]:
        raise ConfigError(f"{field} must be [lowest, highest], two integers of 32 bits")
    return value[0], value[1]


def _tier(field: str, value: Any) -> str:
    if not isinstance(value, str) or value not in TIERS:
        raise ConfigError(f"{field} must be one of {', '.join(TIERS)}")
    return value


def _tiers(field: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one in TIERS for one in value):
        raise ConfigError(f"{field} must be a list of one or several of {', '.join(TIERS)}")
    return tuple(tier for tier in TIERS if tier in value)


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{field} must be true or false")
    return value


FIELDS: dict[str, Callable[[str, Any], Any]] = {
    "key": _digests(_KEY, "1 to 512 visible ASCII characters", lambda text: hashlib.sha256(text.encode()).digest()),
    "sha256": _digests(_SHA256, "the SHA-256 of a key, 64 hexadecimal digits", bytes.fromhex),
    "number": _integer(1, INT32_MAX),
    "weight": _weight,
    "requests": _integer(1, INT32_MAX),
    "waiting_tokens": _integer(0, 1 << 40),
    "tokens_per_minute": _integer(1, 1 << 40),
    "priorities": _priorities,
    "service_tier": _tier,
    "service_tiers": _tiers,
    "share_prefixes": _flag,
}


class KeysFile(NamedTuple):
    """Where keys come from."""

    path: str
    api_key: str
    share_prefixes: bool
    secret: bytes

    def read(self) -> KeyRing | None:
        """As of now; None where no key is needed. Raises ConfigError."""
        return read_keys(*self) if self.path or self.api_key else None


def keys_of(config: Config, secret: bytes = b"") -> KeysFile:
    """Where a server's keys come from. secret: of the server, for the salts."""
    options = config.extension(AdmissionOptions)
    api_key = config.frontend.api_key or os.environ.get("BLINKPY_API_KEY", "")
    return KeysFile(options.api_keys, api_key, options.share_prefixes, secret)

"""The file of --api-keys: a TOML table for each tenant. No error message shows a key, or text that may be a key.

    [research]
    key = "..."                     # or sha256 = "..."; a list while one key replaces another
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
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from blinkpy.config import Config, ConfigError, meant
from blinkpy.dpu.admission.admission_options import AdmissionOptions
from blinkpy.dpu.admission.tenant import TIERS, Tenant
from blinkpy.queues.request_parameters import INT32_MAX, INT32_RANGE

MOST_TENANTS = 500
MOST_BYTES = 1 << 20  # of the file
KEYS_OF_ONE = 8
MOST_TOKENS = 1 << 40
ONE_KEY = "default"  # the tenant of --api-key

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_ONE_KEY = re.compile(r"[^\x00-\x20\x7f\ud800-\udfff]+(?: +[^\x00-\x20\x7f\ud800-\udfff]+)*")  # in UTF-8


class KeyRing:
    """The tenants and their keys. digests: tenants by the SHA-256 of a key."""

    def __init__(self, digests: Mapping[bytes, Tenant]):
        self._secret = secrets.token_bytes(32)  # hides keys from timing attacks on the search
        self._tenants = {self._blind(digest): tenant for digest, tenant in digests.items()}
        self.tenants = {tenant.name: tenant for tenant in digests.values()}

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def find(self, key: bytes) -> Tenant | None:
        """The tenant of a key."""
        return self._tenants.get(self._blind(hashlib.sha256(key).digest()))


def read_keys(path: str, api_key: str, share_prefixes: bool = False, secret: bytes = b"") -> KeyRing:
    """The keys of a file ("": no file), and api_key ("": no key), which belongs to a tenant without limits.

    secret: the server's secret, for salts. Raises ConfigError with file, tenant and reason.
    """
    digests: dict[bytes, Tenant] = {}
    if path:
        for name, table in _tables(path).items():
            try:
                entry = _table(table)
                tenant = entry.tenant(name, share_prefixes, secret)
                for digest in entry.digests():
                    if digest in digests:
                        raise ConfigError(f"shares a key with {digests[digest].name}: give each tenant its own keys")
                    digests[digest] = tenant
            except ConfigError as error:
                raise ConfigError(f"{path}: {name}: {error}") from None
    if api_key:
        if not _ONE_KEY.fullmatch(api_key):  # no client can send it, such as a key with a trailing line break
            raise ConfigError("api_key must fit into a header: remove control characters, and spaces at its ends")
        # A single key needs no salt, because no other tenant can probe its prefixes.
        salt = _salt(ONE_KEY, secret) if path and not share_prefixes else b""
        digest = hashlib.sha256(api_key.encode()).digest()
        if digest in digests:
            raise ConfigError(f"{path}: {digests[digest].name}: shares its key with --api-key: use another key")
        if any(tenant.name == ONE_KEY for tenant in digests.values()):
            raise ConfigError(f"{path}: {ONE_KEY}: rename this tenant: --api-key uses the name")
        digests[digest] = Tenant(ONE_KEY, _number(ONE_KEY), salt=salt)
    numbers: dict[int, str] = {}
    for tenant in {tenant.name: tenant for tenant in digests.values()}.values():
        other = numbers.setdefault(tenant.number, tenant.name)
        if other != tenant.name:
            raise ConfigError(
                f"{path}: {tenant.name}: has the number {tenant.number} of {other}: give one tenant another `number`"
            )
    return KeyRing(digests)


def _tables(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path} is larger than {MOST_BYTES} bytes")
        tables = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"\(at [^)]*\)$", str(error))  # drop the rest of the message, which may quote the file
        raise ConfigError(f"{path} is not TOML {where[0] if where else ''}".rstrip()) from None
    if not 1 <= len(tables) <= MOST_TENANTS:
        raise ConfigError(f"{path} must have 1 to {MOST_TENANTS} tenants, not {len(tables)}")
    for place, (name, table) in enumerate(tables.items(), 1):
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: entry {place} is not a table: begin each tenant with [NAME]")
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{path}: the name of tenant {place} must be 1 to 64 letters, digits and _ . -")
    return tables


# ---- one tenant ---------------------------------------------------------------------------------------------------------


def _field(rule: str, default: str, meaning: str) -> Meta:
    """rule: the rule for its values, in errors. default, meaning: texts for docs/operate.md."""
    return Meta(description=rule, extra={"default": default, "meaning": meaning})


_Key = Annotated[str, Meta(pattern=r"^[!-~]{1,512}$(?!\n)")]
_Digest = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$(?!\n)")]
_Int32 = Annotated[int, Meta(ge=INT32_RANGE[0], le=INT32_RANGE[1])]
_Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
_Tier = Literal["priority", "flex"]
_TIERS = ", ".join(TIERS)


class TenantTable(Struct, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""

    key: Annotated[
        _Key | list[_Key],
        _field("1 to 512 visible ASCII characters, or a list of these", "", "visible ASCII characters; a list for several keys"),
    ] = []
    sha256: Annotated[
        _Digest | list[_Digest],
        _field("the SHA-256 of a key, 64 hexadecimal digits, or a list of these", "", "SHA-256 of a key, instead of `key`"),
    ] = []
    weight: Annotated[
        float,
        Meta(ge=0.01, le=1000),
        _field("a number, 0.01 to 1000", "1", "its share of the service relative to other waiting tenants, 0.01 to 1000"),
    ] = 1.0
    requests: Annotated[
        _Positive | None,
        _field(
            f"an integer, 1 to {INT32_MAX}",
            "no limit",
            "choices in flight. Further requests wait; a single request with more choices gets a 400",
        ),
    ] = None
    waiting_tokens: Annotated[
        Annotated[int, Meta(ge=0, le=MOST_TOKENS)] | None,
        _field(
            f"an integer, 0 to {MOST_TOKENS}",
            "no limit",
            "prompt tokens and `max_tokens` of its waiting requests; 0: no request may wait",
        ),
    ] = None
    tokens_per_minute: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_TOKENS)] | None,
        _field(
            f"an integer, 1 to {MOST_TOKENS}",
            "no limit",
            "prompt tokens and generated tokens. A request is admitted while tokens are left; after an overdraft the next waits",
        ),
    ] = None
    priorities: Annotated[
        tuple[_Int32, _Int32] | None,
        _field(
            "[lowest, highest], two integers of 32 bits",
            "no range",
            "lowest and highest `priority` that it may send; they also order its own waiting requests. "
            "A request without a priority, or with 0, gets the nearest value in the range",
        ),
    ] = None
    service_tier: Annotated[
        _Tier | None,
        _field(
            f"one of {_TIERS}",
            "`priority`, if allowed",
            "the [class](#classes) of requests that name no class, `auto` or `default`",
        ),
    ] = None
    service_tiers: Annotated[
        Annotated[list[_Tier], Meta(min_length=1)] | None,
        _field(
            f"a list of one or several of {_TIERS}",
            "both",
            "classes that its requests may name; other classes get a 403",
        ),
    ] = None
    share_prefixes: Annotated[
        bool | None,
        _field(
            "true or false",
            "`--share-prefixes`",
            "whether it shares the prefix cache with other tenants that also set this",
        ),
    ] = None
    number: Annotated[
        _Positive | None,
        _field(
            f"an integer, 1 to {INT32_MAX}",
            "derived from the name",
            "the tenant number that [policies](policies.md) and recordings use",
        ),
    ] = None

    def digests(self) -> list[bytes]:
        """SHA-256 of each key. Raises ConfigError for a wrong number of keys, or the same key twice."""
        keys = [self.key] if isinstance(self.key, str) else self.key
        hashes = [self.sha256] if isinstance(self.sha256, str) else self.sha256
        found = [hashlib.sha256(key.encode()).digest() for key in keys] + [bytes.fromhex(digest) for digest in hashes]
        if not 1 <= len(found) <= KEYS_OF_ONE:
            raise ConfigError(f"needs 1 to {KEYS_OF_ONE} keys, as `key` or `sha256`")
        if len(set(found)) < len(found):
            raise ConfigError("lists a key twice")
        return found

    def tenant(self, name: str, share_prefixes: bool, secret: bytes) -> Tenant:
        """The tenant. Raises ConfigError for fields that contradict each other."""
        if self.priorities is not None and self.priorities[0] > self.priorities[1]:
            raise ConfigError("priorities must be [lowest, highest], two integers of 32 bits")
        tiers = tuple(tier for tier in TIERS if self.service_tiers is None or tier in self.service_tiers)
        if self.service_tier is not None and self.service_tier not in tiers:
            raise ConfigError("service_tier must be one of service_tiers")
        shares = share_prefixes if self.share_prefixes is None else self.share_prefixes
        return Tenant(
            name,
            number=_number(name) if self.number is None else self.number,
            weight=self.weight,
            requests=self.requests,
            waiting_tokens=self.waiting_tokens,
            tokens_per_minute=self.tokens_per_minute,
            priorities=self.priorities,
            by_priority=self.priorities is not None,
            service_tier=self.service_tier or tiers[0],
            service_tiers=tiers,
            salt=b"" if shares else _salt(name, secret),
        )


def _table(content: dict[str, Any]) -> TenantTable:
    """The table of one tenant. Raises ConfigError; the error shows neither values nor unknown names, which may be keys."""
    for field in content:
        if field not in TenantTable.__struct_fields__:
            known = TenantTable.__struct_fields__
            raise ConfigError(f"unknown field{meant(field, known)}; known fields: {', '.join(known)}")
    try:
        return msgspec.convert(content, TenantTable)
    except msgspec.ValidationError as error:
        found = re.search(r"`\$\.(\w+)", str(error))
        field = found[1] if found else ""
        rules = {item.name: item.type for item in msgspec.inspect.type_info(TenantTable).fields}  # type: ignore[attr-defined]
        raise ConfigError(f"{field} must be {rules[field].extra_json_schema['description']}") from None


def _number(name: str) -> int:
    """The default number of a tenant, derived from its name: equal in all workers, and stable when the file changes."""
    return zlib.crc32(name.encode()) % INT32_MAX + 1


def _salt(name: str, secret: bytes) -> bytes:
    return hmac.digest(secret, name.encode(), "sha256")


class KeysFile(NamedTuple):
    """The sources of keys."""

    path: str
    api_key: str
    share_prefixes: bool
    secret: bytes

    def read(self) -> KeyRing | None:
        """The current keys; None if requests need no key. Raises ConfigError."""
        return read_keys(*self) if self.path or self.api_key else None


def keys_of(config: Config, secret: bytes = b"") -> KeysFile:
    """The sources of a server's keys. secret: the server's secret, for salts."""
    options = config.extension(AdmissionOptions)
    api_key = config.frontend.api_key or os.environ.get("BLINKPY_API_KEY", "")
    return KeysFile(options.api_keys, api_key, options.share_prefixes, secret)

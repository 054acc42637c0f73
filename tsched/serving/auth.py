"""Keys, and whose they are. Without keys everybody is one tenant."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tsched.requests.prompts import MAX_PRIORITY
from tsched.serving.protocol.errors import ApiError
from tsched.torch_free import TKernelsError, suggest_name

OPEN_PATHS = frozenset({"/health", "/live", "/ready"})
"""What answers without a key: it says nothing about anybody's requests."""

ADMIN_PREFIX = "/admin/"

MAX_PART = MAX_PRIORITY // 2
"""Of a tenant's priority and of what a request adds to it: their sum is one that the engine takes."""


class KeyFileError(TKernelsError, ValueError):
    """A file of keys is wrong; the message says where."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose a request is.

    Attributes:
        name: In logs and rates.
        priority: Of the tenant's most urgent request; lower goes first, with order="priority".
        is_admin: Whether the key is for /admin/ routes, and for them alone.
    """

    name: str = ""
    priority: int = 0
    is_admin: bool = False

    def salt(self, asked: str | None) -> str:
        """Separates the tenant's cached prefixes from others', and within them by what a request asks for."""
        return hashlib.sha256(f"{self.name}\0{asked or ''}".encode("utf-8", "surrogatepass")).hexdigest()


class Keys:
    """Finds the tenant of a key.

    Args:
        tenants: Key -> whose it is. Only hashes of the keys are kept.
    """

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in tenants.items()]

    def find(self, authorization: bytes | None) -> Tenant:
        """The tenant of an Authorization header; all keys are compared, each in constant time.

        Raises:
            ApiError: 401, the key is missing or unknown.
        """
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise _unauthorized("no key was given: send the header `Authorization: Bearer KEY`")
        digest, found = hashlib.sha256(key.strip()).digest(), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(digest, known):
                found = tenant
        if found is None:
            raise _unauthorized("the key is unknown")
        return found


def check_access(keys: Keys | None, path: str, authorization: bytes | None) -> Tenant:
    """The tenant who asks for a path.

    Raises:
        ApiError: 401 where the path needs another key; 404 for /admin/ where there are no keys.
    """
    if path in OPEN_PATHS:
        return Tenant()
    is_admin = path.startswith(ADMIN_PREFIX)
    if keys is None:
        if is_admin:
            raise ApiError(404, f"{path} needs a key of its own, and this server was started without keys", "not_found")
        return Tenant()
    tenant = keys.find(authorization)
    if tenant.is_admin != is_admin:
        raise _unauthorized(f"an admin's key is for {ADMIN_PREFIX} alone, and {ADMIN_PREFIX} takes no other")
    return tenant


def read_keys(file: Path) -> Keys:
    """Reads a YAML list of `{key, tenant, priority, admin}`; `tenant` is the place in the list where it is not given.

    Raises:
        KeyFileError: It cannot be read, or an entry is wrong.
    """
    try:
        entries = yaml.load(file.read_text(encoding="utf-8"), _OnceLoader)
    except OSError as error:
        raise KeyFileError(f"{file}: cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:  # whose own words quote the line, and so a key
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise KeyFileError(f"{file}: {line}not YAML") from None
    except KeyFileError as error:
        raise KeyFileError(f"{file}: {error}") from None
    except (ValueError, RecursionError, yaml.YAMLError):  # of UTF-8 too
        raise KeyFileError(f"{file}: is no YAML") from None
    if not isinstance(entries, list) or not entries:
        raise KeyFileError(f"{file}: must be a YAML list of {{key: …, tenant: …}}")
    return Keys(_read_entries(file, entries))


class _OnceLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, where PyYAML lets the last one stand."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            raise KeyFileError(f"line {node.start_mark.line + 1}: an entry has a field twice")
        return mapping


def _read_entries(file: Path, entries: Sequence[Any]) -> dict[str, Tenant]:
    tenants: dict[str, Tenant] = {}
    kinds = {"key": str, "tenant": str, "priority": int, "admin": bool}
    for place, entry in enumerate(entries):
        if not isinstance(entry, dict) or "key" not in entry:
            raise KeyFileError(f"{file}: entry {place} must be a mapping with a `key`")
        for name, value in entry.items():
            if name not in kinds:
                raise KeyFileError(f"{file}: entry {place} has an unknown field {name!r}{suggest_name(name, kinds)}")
            if type(value) is not kinds[name]:
                raise KeyFileError(f"{file}: entry {place}: {name} must be a {kinds[name].__name__}")
        key = entry["key"]
        if len(key) < 16 or not key.isascii() or any(letter.isspace() for letter in key):
            raise KeyFileError(f"{file}: entry {place}: a key has 16 ASCII characters or more, and no spaces")
        if key in tenants:
            raise KeyFileError(f"{file}: entry {place} has the key of another")
        if abs(priority := entry.get("priority", 0)) > MAX_PART:
            raise KeyFileError(f"{file}: entry {place}: priority must be from {-MAX_PART} to {MAX_PART}")
        tenants[key] = Tenant(entry.get("tenant", str(place)), priority, entry.get("admin", False))
    _check_names(file, entries)
    return tenants


def _check_names(file: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Refuses an empty name, and one that is the place of an entry without a name: they would be one tenant."""
    named = {entry["tenant"]: place for place, entry in reversed([*enumerate(entries)]) if "tenant" in entry}
    if "" in named:
        raise KeyFileError(f"{file}: entry {named['']}: tenant must not be empty")
    for place, entry in enumerate(entries):
        if "tenant" not in entry and str(place) in named:
            other = named[str(place)]
            raise KeyFileError(
                f"{file}: entry {other}: tenant '{place}' is entry {place}, which has no name: give it one"
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, "invalid_api_key", kind="authentication_error")

"""Needs: whether this machine has what the settings ask for, looked at before anything starts.

Comes in: settings. Goes out: nothing, or a ConfigError that says what is missing and how to get it.
Imports none of the packages it looks for, but for the file system of a remote store.
"""

from __future__ import annotations

import errno
import os
import tempfile
from importlib.util import find_spec

from keepstep.config import Settings
from keepstep.errors import ConfigError
from keepstep.model.topology import Parity, ReedSolomon, parse_policy

TORCH = (
    "expected PyTorch, found none: pip install 'keepstep[torch]' (without a GPU: pip install torch "
    "--index-url https://download.pytorch.org/whl/cpu)"
)
NIXL_MODULES = ("nixl_cu13", "nixl_cu12")  # either does: over a network they differ in nothing
NO_NIXL = "expected NIXL for 'nixl', found none: pip install 'keepstep[nixl]'"
EXTRA_OF = {"s3": "s3", "s3a": "s3"}  # by a store's protocol: which of our extras brings it
# What a directory answers that will never be one. Others, such as a full disk, may pass, and a job
# goes on from memory meanwhile.
LASTING = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EINVAL,
    errno.ENAMETOOLONG,
}


def has_package(name: str) -> bool:
    """Whether it can be imported, without importing it."""
    try:
        return find_spec(name) is not None
    except ValueError:  # it stands in sys.modules as None: it is kept out on purpose
        return False


def has_nixl() -> bool:
    """Whether NIXL is here, in either of its builds."""
    return any(map(has_package, NIXL_MODULES))


def check_torch(what: str) -> None:
    """Raises ConfigError where PyTorch is not installed. `what`: needs it."""
    if not has_package("torch"):
        raise ConfigError(f"{what}: {TORCH}")


def check_needs(settings: Settings) -> None:
    """Raises ConfigError naming the option, what it needs and how to get it."""
    _check_arena(str(settings.arena_dir))
    if settings.store is not None:
        _check_store(str(settings.store))
    if settings.metrics_port is not None and not has_package("prometheus_client"):
        raise ConfigError(
            "metrics_port: expected prometheus-client, found none: pip install 'keepstep[metrics]'"
        )
    if settings.block_mac == "on" and not has_package("cryptography"):
        raise _no_cryptography("block_mac")
    if settings.encrypt:
        _check_encryption(settings)
    if settings.transport == "nixl" and not has_nixl():
        raise ConfigError(f"transport: {NO_NIXL}")
    if settings.node_provider.startswith("kubernetes"):
        _check_kubernetes(settings)
    codes = (Parity, ReedSolomon)
    if isinstance(parse_policy(settings.redundancy), codes) and not has_package("numpy"):
        raise ConfigError(
            f"redundancy: expected numpy for {settings.redundancy!r}, found none: "
            "pip install 'keepstep[rs]'"
        )


def unsigned_blocks(settings: Settings) -> str:
    """Why what crosses between nodes is not under MACs, where nobody has decided so; else empty."""
    is_decided = settings.block_mac != "auto" or settings.encrypt
    if is_decided or has_package("cryptography"):
        return ""
    return (
        "what this node sends to others is not signed, since keepstep[secure] is not installed: "
        "who can change packets on the way can change a state; pip install 'keepstep[secure]' on "
        "every node, or say KEEPSTEP_BLOCK_MAC=off"
    )


def _check_kubernetes(settings: Settings) -> None:
    if settings.replace_command is not None:
        raise ConfigError(
            f"node_provider: expected no replace_command with {settings.node_provider!r}, found "
            f"{settings.replace_command!r}: a lost node is asked for once"
        )
    if not has_package("kubernetes"):
        raise ConfigError(
            "node_provider: expected the Kubernetes client, found none: "
            "pip install 'keepstep[kubernetes]'"
        )
    if not (os.environ.get("KUBERNETES_SERVICE_HOST") or os.environ.get("KUBECONFIG")):
        raise ConfigError(
            f"node_provider: expected to run in a pod, or KUBECONFIG, for "
            f"{settings.node_provider!r}, found neither"
        )


def _check_encryption(settings: Settings) -> None:
    if not has_package("cryptography"):
        raise _no_cryptography("encrypt")
    if settings.secret is None:
        raise ConfigError(
            "encrypt: expected a `secret` of the job's own, found none: one that is made at the "
            "start crosses the network readable; set KEEPSTEP_SECRET on every node"
        )


def _no_cryptography(option: str) -> ConfigError:
    return ConfigError(
        f"{option}: expected cryptography, found none: pip install 'keepstep[secure]'"
    )


def _check_arena(path: str) -> None:
    try:
        tempfile.TemporaryDirectory(dir=path).cleanup()
    except OSError as error:
        if error.errno in LASTING:
            found = error.strerror if os.path.isdir(path) else "no such directory"
            raise ConfigError(
                "arena_dir: expected a directory in memory, such as /dev/shm, in which a job can "
                f"make its own, found {path!r}: {found}"
            ) from error


def _check_store(url: str) -> None:
    protocol, found, _ = url.partition("://")
    if not found:
        _check_directory(url)
    elif protocol in ("file", "local"):
        _check_directory(url.partition("://")[2])
    else:
        _check_protocol(url, protocol)


def _check_directory(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        if error.errno in LASTING:
            raise ConfigError(
                f"store: expected a directory that can be made and written to, found {path!r}: "
                f"{error.strerror}"
            ) from error


def _check_protocol(url: str, protocol: str) -> None:
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = EXTRA_OF.get(protocol)
        hint = f"pip install 'keepstep[{extra}]'" if extra else str(error)
        raise ConfigError(
            f"store: expected the package that reads {protocol}:// for {url!r}, found none: {hint}"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"store: expected a directory or a URL that fsspec knows, found {url!r}: {error}"
        ) from error

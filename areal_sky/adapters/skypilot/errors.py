"""SkyPilot's exceptions -> ours, by what the caller can do about them. One table; imports no `sky`.

Exceptions are known by the names of their classes, so that one that a newer SkyPilot derives from an older one is
still known by its base.
"""

from __future__ import annotations

import re

from areal_sky.errors import (
    AlreadyExists,
    ArealSkyError,
    NoCapacity,
    NotFound,
    QuotaExceeded,
    Refused,
    Unauthorized,
    Unreachable,
)

# Class name -> our error, and what to do about it (said after SkyPilot's own words). The first match in an exception's
# line of classes counts, so a derived class stands before its base by itself.
TABLE: dict[str, tuple[type[ArealSkyError], str]] = {
    # nothing to be had: another offer, or later
    "ResourcesUnavailableError": (NoCapacity, ""),
    "KubeAPIUnreachableError": (NoCapacity, ""),
    "ProvisionUnsupportedError": (Refused, "this place can never serve it: change `resources` or `infra`"),
    # fix the ask
    "ResourcesMismatchError": (Refused, "the cluster of that name has other machines: end it, or choose another name"),
    "NotSupportedError": (Refused, "this cloud cannot do that: change the spec"),
    "InvalidClusterNameError": (Refused, "choose another `name` or group name"),
    "InvalidSkyPilotConfigError": (Refused, "fix ~/.sky/config.yaml or the spec's `config`"),
    "UserRequestRejectedByPolicy": (Refused, "an admin policy of this SkyPilot said no"),
    "KubernetesValidationError": (Refused, "fix the spec's `config`"),
    "StorageSpecError": (Refused, "fix `file_mounts`"),
    "WorkspaceAmbiguousError": (Refused, "set `active_workspace` in ~/.sky/config.yaml"),
    "VolumeNotFoundError": (Refused, "fix `volumes`"),
    "APIVersionMismatchError": (Refused, "client and API server differ too much: upgrade one, then `sky api stop`"),
    "APINotSupportedError": (Refused, "this API server is too old: upgrade it"),
    # who we are
    "ClusterOwnerIdentityMismatchError": (Unauthorized, "it belongs to another cloud identity: switch to that one"),
    "CloudUserIdentityError": (Unauthorized, "log in to the cloud again, then `sky check`"),
    "InvalidCloudCredentials": (Unauthorized, "renew the credentials, then `sky check`"),
    "InvalidCloudConfigs": (Unauthorized, "fix the cloud's configuration, then `sky check`"),
    "NoCloudAccessError": (Unauthorized, "no cloud is enabled: `sky check` says why"),
    "PermissionDeniedError": (Unauthorized, "ask an admin of this SkyPilot for the right"),
    "ApiServerAuthenticationError": (Unauthorized, "`sky api login`"),
    # SkyPilot itself does not answer
    "ApiServerConnectionError": (Unreachable, "`sky api start`, or check its address with `sky api info`"),
    "ServerTemporarilyUnavailableError": (Unreachable, ""),
    "RequestInterruptedError": (Unreachable, ""),
    "ConnectionError": (Unreachable, ""),  # requests' and Python's own
    "Timeout": (Unreachable, ""),
    "ClusterStatusFetchingError": (Unreachable, ""),
    # the cluster itself
    "ClusterDoesNotExist": (NotFound, ""),
    "CachedClusterUnavailable": (NotFound, ""),
    "ClusterNotUpError": (NotFound, ""),
    "RequestAlreadyExistsError": (AlreadyExists, ""),
}

# What clouds call a quota, in the words that SkyPilot passes on (AWS, GCP, Azure, Slurm, Kubernetes).
_QUOTA = re.compile(
    r"quota|limit ?exceeded|vcpulimit|exceeds? .{0,40}\blimit|AssocGrp|QOSMax|QOSGrp|MaxSpotInstanceCount",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(
    r"AuthFailure|UnauthorizedOperation|AccessDenied|InvalidClientTokenId|ExpiredToken|invalid credential|"
    r"Permission denied \(publickey|credentials? (have|has|is|are) (expired|invalid)",
    re.IGNORECASE,
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\?\[[0-9;]*m")
MAX_CHARS = 400


def translate(error: BaseException, doing: str = "") -> ArealSkyError:
    """Our error for one that SkyPilot raised; ours stay as they are. `doing` says in words what was tried."""
    if isinstance(error, ArealSkyError):
        return error
    history = tuple(getattr(error, "failover_history", ()) or ())
    words = _words(error, history)
    known = next((TABLE[c.__name__] for c in type(error).__mro__ if c.__name__ in TABLE), None)
    kind, hint = known or (ArealSkyError, "")
    if kind is NoCapacity:
        everything = " ".join([words, *map(str, history)])
        # The optimizer found nothing at all: waiting will not help, and it says what is wrong.
        if not history and "Catalog does not contain" in everything:
            kind = Refused
        elif _CREDENTIALS.search(everything):
            kind, hint = Unauthorized, "renew the credentials, then `sky check`"
        elif _QUOTA.search(everything):
            kind, hint = QuotaExceeded, "ask the cloud for more, or allow other machines or regions"
    elif known is None and _CREDENTIALS.search(words):
        kind, hint = Unauthorized, "renew the credentials, then `sky check`"
    text = f"{doing}: {words}" if doing else words
    return kind(f"{text} ({hint})" if hint else text)


def _words(error: BaseException, history: tuple[BaseException, ...]) -> str:
    """SkyPilot's message on one line, without its colours and hints, the last failed attempt first."""
    texts = [str(e) for e in (*reversed(history), error)]
    lines = [line.strip() for text in texts for line in _ANSI.sub("", text).splitlines()]
    kept = list(dict.fromkeys(line for line in lines if line and not line.startswith(("Hint", "To keep retrying"))))
    words = "; ".join(kept) or type(error).__name__
    return words if len(words) <= MAX_CHARS else words[: MAX_CHARS - 3] + "..."

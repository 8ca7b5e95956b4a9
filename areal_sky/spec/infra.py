"""SkyPilot's infra strings, `cloud[/region[/zone]]`, and our `local`."""

from __future__ import annotations

from areal_sky.errors import InvalidInput
from areal_sky.spec.fields import did_you_mean

LOCAL = "local"

# sky/skylet/constants.py ALL_CLOUDS of SkyPilot 0.14.1, and its short name for kubernetes.
CLOUDS = (
    "aws", "azure", "gcp", "ibm", "lambda", "scp", "oci", "kubernetes", "k8s", "runpod", "vast", "vsphere", "cudo",
    "fluidstack", "paperspace", "primeintellect", "do", "nebius", "ssh", "slurm", "hyperbolic", "seeweb", "shadeform",
    "yotta", "mithril", "verda",
)  # fmt: skip
# One's own machines: their accelerators may have names that no catalog has.
OWN_MACHINES = ("kubernetes", "k8s", "ssh", "slurm")
INFRA_GRAMMAR = "cloud[/region[/zone]] such as aws/us-east-1, k8s/CONTEXT, slurm/CLUSTER/PARTITION, or local"

# What people call a cloud, and what SkyPilot calls it.
_OTHER_NAMES = {"amazon": "aws", "google": "gcp", "gke": "k8s", "eks": "k8s", "aks": "k8s", "kube": "k8s",
                "oracle": "oci", "digitalocean": "do", "lambdalabs": "lambda", "microsoft": "azure"}  # fmt: skip


def check_infra(text: str) -> str:
    """The infra string with its cloud in lower case. Raises InvalidInput."""
    stripped = text.strip().strip("/")
    cloud, *rest = [part.strip() for part in stripped.split("/")]
    cloud = cloud.lower()
    if not cloud or not all(rest):
        raise InvalidInput(f"`{text[:60]}` has an empty part, expected {INFRA_GRAMMAR}")
    if cloud == LOCAL:
        if rest:
            raise InvalidInput(f"`{text[:60]}` has parts after `local`, expected `local` alone")
        return LOCAL
    if cloud not in CLOUDS and cloud != "*":
        other = _OTHER_NAMES.get(cloud)
        meant = f", did you mean `{other}`?" if other else did_you_mean(cloud, (*CLOUDS, LOCAL))
        raise InvalidInput(f"`{cloud[:40]}` is no cloud that SkyPilot knows, expected {INFRA_GRAMMAR}{meant}")
    if len(rest) > 2 and cloud not in ("kubernetes", "k8s", "ssh"):  # a Kubernetes context may hold slashes
        raise InvalidInput(f"`{text[:60]}` has too many parts, expected {INFRA_GRAMMAR}")
    return "/".join([cloud, *rest])


def owns_machines(infra: str | None) -> bool:
    """True on Kubernetes, SSH node pools and Slurm, where accelerators may have names of their own."""
    return infra is not None and infra.split("/")[0] in OWN_MACHINES

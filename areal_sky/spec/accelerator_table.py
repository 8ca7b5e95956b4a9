"""The accelerators that clouds rent, as SkyPilot names them. Data, kept as Python so that spec does no I/O.

Names: SkyPilot's public catalog (skypilot-catalog, catalogs/v8/common/accelerators.csv) and the names that its
0.14.1 code knows beyond it (GKE and Kubernetes labels, AWS Neuron).
Memory: GB per device from the vendors' data sheets, taken as GiB like SkyPilot does. Where SkyPilot's metadata.csv
differs (it has 80 for H200, B200 and GH200) the data sheet wins: 141, 180 (HGX) and 96 GB.
TPU rows have no memory: a TPU is asked for by slice, `tpu-v6e-8`, never by memory.
"""

from __future__ import annotations

NVIDIA: dict[str, float] = {
    "A10": 24, "A10G": 24, "A16": 16, "A30": 24, "A40": 48, "A100": 40, "A100-80GB": 80, "A100-80GB-SXM": 80,
    "A4000": 16, "A5000": 24, "A6000": 48, "A800": 80, "B100": 192, "B200": 180, "B300": 288, "GB200": 186,
    "GB300": 288, "GH200": 96, "GTX1660S": 6, "H100": 80, "H100-MEGA": 80, "H100-NVL": 94, "H100-NVLINK": 80,
    "H100-SXM": 80, "H200": 141, "H200-SXM": 141, "K80": 12, "L4": 24, "L40": 48, "L40S": 48, "M4000": 8, "M60": 8,
    "P4": 8, "P100": 16, "P4000": 8, "RTX2000-Ada": 16, "RTX3060": 12, "RTX3070": 8, "RTX3080": 10,
    "RTX3080-Ti": 12, "RTX3090": 24, "RTX3090-Ti": 24, "RTX4000": 8, "RTX4000-Ada": 20, "RTX4080": 16,
    "RTX4080-SUPER": 16, "RTX4090": 24, "RTX5000": 16, "RTX5000-Ada": 32, "RTX5060": 8, "RTX5080": 16,
    "RTX5090": 32, "RTX6000": 24, "RTX6000-Ada": 48, "RTX6000Ada": 48, "RTX8000": 48, "RTXA2000": 6,
    "RTXA4000": 16, "RTXA4500": 20, "RTXA5000": 24, "RTXA6000": 48, "RTXPRO4500": 32, "RTXPRO6000": 96,
    "RTXPRO6000-MaxQ": 96, "RTXPRO6000-WK": 96, "RTXPRO6000S": 96, "RTXPRO6000WS": 96, "T4": 16, "T4g": 16,
    "V100": 16, "V100-32GB": 32,
}  # fmt: skip
AMD: dict[str, float] = {
    "MI300X": 192, "MI325X": 256, "MI355X": 288, "Radeon MI25": 16, "Radeon Pro V520": 8,
}  # fmt: skip
INTEL: dict[str, float] = {"Gaudi HL-205": 32}
AWS: dict[str, float] = {"Inferentia": 8, "Inferentia2": 32, "Trainium": 32, "Trainium2": 96}

# Slices of Google's TPUs are `<generation>-<size>`; on GKE a generation has a name of its own and a count.
TPU_GENERATIONS = ("tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5litepod", "tpu-v5p", "tpu-v6e")
TPU_ON_GKE = ("tpu-v4-podslice", "tpu-v5-lite-device", "tpu-v5-lite-podslice", "tpu-v5p-slice", "tpu-v6e-slice")
# Google calls it v5e, its API and SkyPilot v5litepod.
TPU_OTHER_NAMES = {"tpu-v5e": "tpu-v5litepod", "tpu-v5lite": "tpu-v5litepod"}

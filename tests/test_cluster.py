"""Cluster files."""

import pytest
import yaml

from realhf.cluster import Cluster
from realhf.shipped import shipped_dir

GOOD = """
num_hosts: 2
devices_per_host: 4
device_memory_bytes: 1.0e+9
host_memory_bytes: 2.0e+9
memory_bandwidth_bytes_per_second: 1.0e+10
peak_flops: {float32: 1.0e+11}
intra_host: {latency_seconds: 1.0e-6, bandwidth_bytes_per_second: 1.0e+10}
inter_host: {latency_seconds: 1.0e-5, bandwidth_bytes_per_second: 1.0e+9}
"""


def test_counts_devices():
    assert Cluster.from_dict(yaml.safe_load(GOOD)).num_devices == 8


def test_every_shipped_cluster_loads_by_its_name():
    names = [path.stem for path in shipped_dir("plans/clusters").glob("*.yaml")]
    assert {"cpu-laptop", "h100-8x8"} <= set(names)
    for name in names:
        cluster = Cluster.load(name)
        assert cluster.intra_host.bandwidth_bytes_per_second > cluster.inter_host.bandwidth_bytes_per_second
        assert cluster.intra_host.latency_seconds < cluster.inter_host.latency_seconds
    h100 = Cluster.load("h100-8x8")
    assert h100.num_devices == 64 and h100.peak_flops["bfloat16"] == 989e12


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("num_hosts: 2", "num_hosts: 0", "num_hosts is 0: it must be a whole number"),
        ("num_hosts: 2", "num_hosts: 1.5", "num_hosts is 1.5"),
        ("num_hosts: 2", "hosts: 2", "hosts is not a field: legal are num_hosts, devices_per_host"),
        ("num_hosts: 2", "", "num_hosts is missing"),
        ("{float32: 1.0e+11}", "{float32: fast}", "peak_flops.float32 is 'fast': it must be a number"),
        ("{float32: 1.0e+11}", "9.9e+14", "peak_flops must map dtype names"),
        ("latency_seconds: 1.0e-6", "latency_seconds: -1", "intra_host.latency_seconds is -1"),
        ("latency_seconds: 1.0e-5, ", "", "inter_host.latency_seconds is missing"),
        ("{latency_seconds: 1.0e-6, bandwidth_bytes_per_second: 1.0e+10}", "5", "intra_host is 5"),
        ("device_memory_bytes: 1.0e+9", "device_memory_bytes: .nan", "device_memory_bytes is nan"),
        ("num_hosts: 2", "[", "while parsing"),
    ],
)
def test_load_names_file_and_field(tmp_path, old, new, sentence):
    assert old in GOOD
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError) as caught:
        Cluster.load(str(path))
    assert str(path) in str(caught.value) and sentence in str(caught.value)


def test_unknown_names_list_the_shipped_ones():
    with pytest.raises(ValueError, match="'h200' is neither a path nor a shipped name .*laptop, h100-8x8"):
        Cluster.load("h200")

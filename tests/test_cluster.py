"""Cluster files."""

from dataclasses import replace

import pytest
import yaml

from realhf.cluster import Cluster, Link
from realhf.user_input.shipped import shipped_dir

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
    cluster = Cluster.from_dict(yaml.safe_load(GOOD))
    assert cluster.num_devices == 8
    assert cluster.count_by_host(range(8)) == {0: 4, 1: 4}
    assert cluster.count_by_host([1, 3, 4]) == {0: 2, 1: 1}


def test_a_host_may_have_less_than_its_devices_ports():
    document = yaml.safe_load(GOOD)
    assert Cluster.from_dict(document).host_port_bytes_per_second == 4 * 1e9
    shared = Cluster.from_dict({**document, "host_bandwidth_bytes_per_second": 2.5e9})
    assert shared.host_port_bytes_per_second == 2.5e9


def test_one_host_needs_no_link_between_hosts():
    document = yaml.safe_load(GOOD)
    del document["inter_host"]
    alone = Cluster.from_dict(document | {"num_hosts": 1})
    assert alone.inter_host is None and alone.link(within_host=False) == alone.intra_host
    assert alone.host_port_bytes_per_second == 4 * 1e10
    with pytest.raises(ValueError, match="inter_host is missing: 2 hosts need the link between them"):
        Cluster.from_dict(document)


def test_units():
    document = yaml.safe_load(GOOD) | {
        "device_memory_bytes": "80 GiB", "memory_bandwidth_bytes_per_second": "3.35TB/s",
        "peak_flops": {"bfloat16": "989 TFLOP/s", "float32": 1e11},
        "inter_host": {"latency_seconds": "10 us", "bandwidth_bytes_per_second": "400 Gbit/s"},
        "host_memory": {"latency_seconds": "1e1 us", "bandwidth_bytes_per_second": "64 GB/s"},
    }
    cluster = Cluster.from_dict(document)
    assert cluster.device_memory_bytes == 80 * 2**30
    assert cluster.memory_bandwidth_bytes_per_second == pytest.approx(3.35e12)
    assert cluster.peak_flops == {"bfloat16": 989e12, "float32": 1e11}
    assert cluster.inter_host == Link(pytest.approx(1e-5), 50e9)
    assert cluster.host_memory == Link(pytest.approx(1e-5), 64e9)
    assert Cluster.from_dict(yaml.safe_load(GOOD)).host_memory is None


def test_every_shipped_cluster_loads_by_its_name():
    names = [path.stem for path in shipped_dir("plans/clusters").glob("*.yaml")]
    h100s = {f"h100-{num_hosts}x8" for num_hosts in (1, 2, 8, 16, 128)}
    assert {"cpu-laptop", "a100-8x8", "h200-8x8", *h100s} <= set(names)
    for name in names:
        cluster = Cluster.load(name)
        assert cluster.intra_host.bandwidth_bytes_per_second > cluster.inter_host.bandwidth_bytes_per_second
        assert cluster.intra_host.latency_seconds < cluster.inter_host.latency_seconds
        if name != "cpu-laptop":
            assert f"{cluster.num_hosts}x{cluster.devices_per_host}" == name.split("-")[-1]
    h100 = Cluster.load("h100-8x8")
    assert h100.num_devices == 64 and h100.peak_flops["bfloat16"] == 989e12


def test_shipped_devices_have_the_memory_that_cuda_reports():
    """nvidia-smi shows 81,559 MiB of an H100 SXM and 143,771 MiB of an H200, of which CUDA offers a little
    less; a DGX has one NIC for each of eight devices."""
    for path in shipped_dir("plans/clusters").glob("h*00-*x8.yaml"):
        for kind in Cluster.load(path.stem).kinds:
            shown = 143_771 * 2**20 if kind.accelerator == "h200" else 81_559 * 2**20
            assert 0.99 * shown < kind.device_memory_bytes < shown, path
    assert Cluster.load("h100-8x8").host_port_bytes_per_second == 400e9
    assert Cluster.load("a100-8x8").host_port_bytes_per_second == 200e9


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("num_hosts: 2", "num_hosts: 0", "num_hosts is 0: it must be a whole number"),
        ("num_hosts: 2", "num_hosts: 1.5", "num_hosts is 1.5"),
        ("num_hosts: 2", "hosts: 2", "hosts is not a field (did you mean num_hosts?): legal are num_hosts, "),
        ("num_hosts: 2", "", "num_hosts is missing"),
        ("{float32: 1.0e+11}", "{float32: fast}", "peak_flops.float32 is 'fast': it must be a number"),
        ("{float32: 1.0e+11}", "9.9e+14", "peak_flops must map dtype names"),
        ("latency_seconds: 1.0e-6", "latency_seconds: -1", "intra_host.latency_seconds is -1"),
        ("latency_seconds: 1.0e-5, ", "", "inter_host.latency_seconds is missing"),
        ("{latency_seconds: 1.0e-6, bandwidth_bytes_per_second: 1.0e+10}", "5", "intra_host is 5"),
        ("\n", "\nhost_bandwidth_bytes_per_second: 0\n", "host_bandwidth_bytes_per_second is 0: it must"),
        ("\n", "\nhost_bandwidth: 1\n", "host_bandwidth is not a field"),
        ("device_memory_bytes: 1.0e+9", "device_memory_bytes: .nan", "device_memory_bytes is nan"),
        ("num_hosts: 2", "[", "while parsing"),
        ("1.0e+9\n", "80 Gb\n", "device_memory_bytes is '80 Gb': it must be a number, or one with"),
        ("1.0e-6", "5 GB", "intra_host.latency_seconds is '5 GB': it must be a number, or one with"),
        ("1.0e+10}", "-4 GB/s}", "intra_host.bandwidth_bytes_per_second is -4000000000.0: it must be"),
        ("1.0e+11", "9 TFLOPs", "peak_flops.float32 is '9 TFLOPs': it must be a number, or one with a unit"),
        ("1.0e+11", "1.2.3", "peak_flops.float32 is '1.2.3': it must be a number"),
        ("1.0e+9\n", "80\n", "device_memory_bytes is 80 bytes, less than any device has: write the"),
        ("1.0e+10}", "20}", "intra_host.bandwidth_bytes_per_second is 20 bytes per second, less than any"),
        ("1.0e+11", "989", "peak_flops.float32 is 989 FLOP/s, less than any device has"),
        ("\n", "\nrails: 4\n", "rails is 4: legal are true and false"),
        ("\n", "\nhosts_per_leaf: 2\n", "hosts_per_leaf and oversubscription belong together"),
        ("\n", "\nhosts_per_leaf: 1.5\noversubscription: 2\n", "hosts_per_leaf is 1.5: it must be a whole"),
        ("\n", "\nhosts_per_leaf: 2\noversubscription: 0.5\n", "oversubscription is 0.5: it must be at"),
        ("\n", "\nhosts_per_leaf: 0\noversubscription: 2\n", "hosts_per_leaf is 0: it must be a number"),
    ],
)
def test_load_names_file_and_field(tmp_path, old, new, sentence):
    assert old in GOOD
    path = tmp_path / "cluster.yaml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ValueError) as caught:
        Cluster.load(str(path))
    assert str(path) in str(caught.value) and sentence in str(caught.value)


KINDS = """
hosts:
  - {count: 2, like: h100-8x8}
  - {count: 1, like: a100-8x8, device_memory_bytes: 40 GB}
inter_host: {latency_seconds: 10 us, bandwidth_bytes_per_second: 100 Gbit/s}
"""


def test_hosts_of_two_kinds():
    cluster = Cluster.from_dict(yaml.safe_load(KINDS))
    fast, slow = cluster.kinds
    far = cluster.inter_host
    assert far == Link(pytest.approx(1e-5), 12.5e9)
    assert fast == replace(Cluster.load("h100-8x8"), num_hosts=2, inter_host=far)
    assert slow == replace(Cluster.load("a100-8x8"), num_hosts=1, inter_host=far, device_memory_bytes=40e9)
    assert [ranks for ranks, _ in cluster.ranks_by_kind] == [range(0, 16), range(16, 24)]
    assert cluster.num_devices == 24 and cluster.device_memory_bytes == 79.1 * 2**30
    assert cluster.peak_flops == slow.peak_flops and cluster.intra_host == slow.intra_host
    indices = [cluster.kind_index(ranks) for ranks in (range(16), [16, 23], [15, 16], [24])]
    assert indices == [0, 1, None, None]
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert cluster.first_devices(16) == fast and cluster.first_devices(24) == cluster
    assert cluster.first_devices(4) == replace(fast, num_hosts=1, devices_per_host=4)
    shipped = [Cluster.load(name) for name in ("h100-a100-4x8", "h100-8x8")]
    assert [len(each.kinds) for each in shipped] == [2, 1]


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("count: 2", "count: 0", "hosts[0].count is 0: it must be a whole number of at least 1"),
        ("count: 2, ", "", "hosts[0].count is missing"),
        ("like: h100-8x8", "like: h100", "hosts[0].like: 'h100' is neither a path nor a shipped name"),
        ("like: h100-8x8", "like: 8", "hosts[0].like is 8: it must name a cluster file"),
        ("like: h100-8x8", "like: h100-a100-4x8", "hosts[0].like is 'h100-a100-4x8': that file has several"),
        (", like: h100-8x8", "", "hosts[0].devices_per_host is missing"),
        ("40 GB", "40 Gb", "hosts[1].device_memory_bytes is '40 Gb': it must be a number"),
        ("device_memory_bytes", "memory", "hosts[1].memory is not a field"),
        ("device_memory_bytes: 40 GB", "rails: true", "hosts[1].rails is not a field"),
        ("device_memory_bytes: 40 GB", "devices_per_host: 4", "hosts[1].devices_per_host is 4, that of "),
        ("device_memory_bytes: 40 GB", "device_type: cpu", "hosts[1].device_type is cpu, that of hosts[0]"),
        ("100 Gbit/s", "fast", "cluster.yaml: inter_host.bandwidth_bytes_per_second is 'fast'"),
        ("\ninter_host", "\nrails: 4\ninter_host", "cluster.yaml: rails is 4: legal are"),
        ("\ninter_host", "\nnum_hosts: 4\ninter_host", "num_hosts is not a field (did you mean hosts?)"),
        (KINDS, "hosts: []", "hosts is []: it must list at least one kind"),
        ("{count: 2, like: h100-8x8}", "8", "hosts[0] is 8: it must give count, like, "),
    ],
)
def test_load_names_the_kind_of_hosts(tmp_path, old, new, sentence):
    assert old in KINDS
    path = tmp_path / "cluster.yaml"
    path.write_text(KINDS.replace(old, new, 1))
    with pytest.raises(ValueError) as caught:
        Cluster.load(str(path))
    assert str(path) in str(caught.value) and sentence in str(caught.value)


def test_kinds_need_a_link_between_their_hosts(tmp_path):
    figures = yaml.safe_load(GOOD.replace("num_hosts: 2", "count: 1"))
    del figures["inter_host"]
    with pytest.raises(ValueError, match="inter_host is missing: 2 hosts need the link between them"):
        Cluster.from_dict({"hosts": [figures, figures]})
    path = tmp_path / "cluster.yaml"
    path.write_text(f"hosts:\n  - {{count: 1, like: {path}}}\n")
    with pytest.raises(ValueError, match="nested too deeply"):
        Cluster.load(str(path))


def test_unknown_names_list_the_shipped_ones():
    sentence = "'mine' is neither a path nor a shipped name .*cpu-laptop, h100-128x8"
    with pytest.raises(ValueError, match=sentence):
        Cluster.load("mine")
    with pytest.raises(ValueError, match=r"'h200' is neither .* \(did you mean h200-8x8\?\)"):
        Cluster.load("h200")

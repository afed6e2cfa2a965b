"""Links fitted to what nccl-tests prints, and a profile of one device carried to a cluster with them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from realhf.cli.main import main
from realhf.cluster import Cluster
from realhf.errors import UserError
from realhf.models.model_config import ModelConfig
from realhf.planner.efficiencies import ENGINES, OUR_CUDA, Efficiencies
from realhf.planner.links import Span
from realhf.planner.measured_links import fitted_links, read_nccl_tests
from realhf.planner.problem import ModelRole
from realhf.planner.rates import Rates
from tests.cli.test_plan import write_profile
from tests.cli_tools import write_experiment

H100 = Cluster.load("h100-8x8")
HEADER = """\
# nThread 1 nGpus 1 minBytes 1024 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
{ranks}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


def output(seconds_of, *, hosts, per_host=8):
    """Return what a test prints if a message of n bytes takes `seconds_of(n)`; in place it takes longer."""
    ranks = [
        f"#  Rank {rank:2d} Group  0 Pid {25436 + rank} on node-{rank // per_host} device {rank % per_host} "
        "[0x0f] NVIDIA H100 80GB HBM3" for rank in range(hosts * per_host)]
    rows = []
    for power in range(10, 31, 2):
        size = 1 << power
        micros = seconds_of(size) * 1e6
        rows.append(f"{size:12d} {size // 4:12d}     float     sum      -1 {micros:.6f}    1.0    2.0      0 "
                    f"{2 * micros:.6f}    1.0    2.0      0")
    end = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 123.4\n#\n"
    return HEADER.format(ranks="\n".join(ranks)) + "\n".join(rows) + "\n" + end


def test_links_are_fitted_to_two_tables(tmp_path):
    """Tables of a ring with known latency and bandwidth, inside a host and over two."""
    near, far = (7e-6, 361e9), (19e-6, 20e9)
    inside, between = tmp_path / "all_reduce.txt", tmp_path / "all_gather_perf-16.txt"
    inside.write_text(output(lambda n: 2 * (3 * near[0] + n * 7 / 8 / near[1]), hosts=1))
    between.write_text(output(lambda n: 4 * far[0] + n / 2 / 8 / far[1], hosts=2))
    fitted = fitted_links(H100, [str(between), str(inside)])
    for link, (latency, bandwidth) in ((fitted.cluster.intra_host, near), (fitted.cluster.inter_host, far)):
        assert link.latency_seconds == pytest.approx(latency, rel=0.02)
        assert link.bandwidth_bytes_per_second == pytest.approx(bandwidth, rel=0.01)
    rates = Rates(fitted.cluster, fitted.efficiencies)
    of_four = 2 * (2 * near[0] + 1e9 * 3 / 4 / near[1])
    assert rates.all_reduce(1e9, Span(4, 4)) == pytest.approx(of_four, rel=0.01)
    assert len(fitted.notes) == 2 and "1.00 to 1.00 times the measured seconds" in fitted.notes[1]


def test_a_network_that_is_faster_than_the_links_in_hosts_is_as_fast_as_matters(tmp_path):
    path = tmp_path / "all_gather.txt"
    path.write_text(output(lambda n: 4e-5 + n * 15 / 16 / 361e9, hosts=2))
    link = fitted_links(H100, [str(path)]).cluster.inter_host
    assert link.bandwidth_bytes_per_second == pytest.approx(0.8 * 450e9 / (15 / 16) / 2 / 8, rel=0.01)


def test_a_link_without_a_table_keeps_its_figures(tmp_path):
    path = tmp_path / "sendrecv.txt"
    path.write_text(output(lambda n: 1e-5 + n / 3e11, hosts=1, per_host=2))
    fitted = fitted_links(H100, [str(path)])
    usual = Rates(H100)
    rates = Rates(fitted.cluster, fitted.efficiencies)
    assert rates.send(1e9, within_host=True) == pytest.approx(1e9 / 3e11, rel=0.01)
    assert rates.send(1e9, within_host=False) == pytest.approx(usual.send(1e9, within_host=False))


def test_times_follow_from_bus_bandwidth_if_they_are_left_out(tmp_path):
    path = tmp_path / "reduce_scatter.txt"
    ranks = "\n".join(f"#   Rank {i} Pid 7 on a device {i} [0x07] Tesla" for i in range(4))
    path.write_text(f"{ranks}\n# size busbw\n1048576 50\n1073741824 100\n")
    table = read_nccl_tests(str(path))
    assert (table.method, table.num_ranks, table.num_hosts) == ("reduce_scatter", 4, 1)
    assert table.seconds == pytest.approx((1048576 * 3 / 4 / 50e9, 2**30 * 3 / 4 / 100e9))


GOOD = output(lambda n: 1e-5 + n / 1e11, hosts=2)
BAD = {
    "no ranks": ("all_reduce.txt", GOOD.replace("Rank", "rank"), ["no line `# Rank 0", "whole output"]),
    "no header": ("all_reduce.txt", GOOD.replace("time", "t").replace("busbw", "b"), ["before a header"]),
    "empty": ("all_reduce.txt", HEADER.format(ranks="# Rank 0 on a device 0\n# Rank 1 on a device 1"),
              ["it has 0 sizes", "-b 8 -e 1G"]),
    "one rank": ("all_reduce.txt", "# Rank 0 Pid 1 on a device 0\n", ["on one rank"]),
    "unequal": ("all_reduce.txt", "".join(f"# Rank {i} on h{i // 2} device 0\n" for i in range(3)),
                ["different numbers of ranks (2 on h0, 1 on h1)"]),
    "unnamed": ("links.txt", GOOD, ["which collective it is about", "all_reduce"]),
    "no number": ("alltoall.txt", GOOD.replace("sum      -1 ", "sum      -1 N/A "),
                  ["line 24: time is 'N/A'", "must be a number above 0"]),
    "cut": ("all_reduce.txt", GOOD + "2147483648 536870912 float\n", ["has 3 columns, its header 13"]),
}


@pytest.mark.parametrize("case", BAD)
def test_tables_that_are_refused(case, tmp_path):
    name, text, parts = BAD[case]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_nccl_tests(str(path))
    assert str(caught.value).startswith(f"--links {path}: ") and "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_profile_of_one_device_is_carried_to_a_cluster(tmp_path, capsys):
    """The links of the plan's cluster come from the table, also for other numbers of ranks."""
    experiment = write_experiment(tmp_path, "sft")
    profile = write_profile(tmp_path, devices_per_host=1)
    table = tmp_path / "all_reduce.txt"
    table.write_text(output(lambda n: 1e-4 + n / 2e9, hosts=1, per_host=2))
    words = ["plan", str(experiment), "--profile", str(profile), "--cluster", "cpu-laptop"]
    assert main([*words, "--links", str(table), "--gap", "0.5", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["not_measured"]
    assert notes[0].startswith("intra_host 2 GB/s") and "all_reduce of 2 ranks on 1 host" in notes[0]
    assert main([*words, "--links", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err


# Engines by name


def test_fp8_halves_the_bytes_of_decoding_and_doubles_products():
    """Few rows read the weights, many multiply: both take half as long, apart from the cache and launches."""
    role = ModelRole(ModelConfig.load("llama-3.1-70b"), "bfloat16")
    ideal = replace(Efficiencies(), matmul=1.0)
    plain, half = (Rates(H100, ideal, replace(OUR_CUDA, **values)) for values in (
        {}, {"decode_speed": 2.0, "decode_weight_bytes": 1.0}))
    one = Span(1, 1)
    for rows in (1.0, 4096.0):
        given = {"rows": np.array([rows]), "context": np.zeros(1)}
        seconds = [float(rates.decode_block(role, one, one, **given)[0][0]) for rates in (plain, half)]
        assert seconds[1] == pytest.approx(seconds[0] / 2, rel=1e-6)
    assert math.isclose(plain.block(role, one, one, tokens=4096, squared=0).compute,
                        half.block(role, one, one, tokens=4096, squared=0).compute)


def test_engines_have_names(tmp_path, capsys):
    experiment = write_experiment(tmp_path, "sft")
    assert {"vllm", "vllm-fp8", "nemo-rl"} <= {*ENGINES}
    for words, says in ((["--cluster", "h100-1x8", "--engine", "vlm"], "(did you mean vllm?): legal are"),
                        (["--cluster", "cpu-laptop", "--engine", "vllm"], "the cluster has none"),
                        (["--profile", str(write_profile(tmp_path)), "--engine", "vllm"], "leave one")):
        assert main(["plan", str(experiment), *words]) == 2
        assert says in capsys.readouterr().err

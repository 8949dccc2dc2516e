"""A cluster's topology, from documented node shapes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.catalog import accelerator, cluster, list_clusters, node_shape
from costmodel.catalog.files import entry_names
from costmodel.spec.base import PlanError


def levels(*args, **kwargs):
    return [(level.name, level.kind, level.domain, level.bytes_per_s) for level in cluster(*args, **kwargs).levels]


def test_every_node_shape_loads_and_makes_a_cluster():
    shapes = list_clusters()
    assert [shape.name for shape in shapes] == list(entry_names("nodes")) and len(shapes) == 41
    for shape in shapes:
        made = cluster(nodes=2, name=shape.name, gpu=None if shape.accelerator else "l4")
        assert made.gpus == 2 * shape.gpus_per_node and made.nodes == 2


def test_one_dgx_h100_is_nvlink_alone():
    # DGX H100: 8 GPUs, 900 GB/s of NVLink both ways, switches that reduce
    assert levels(8, "h100") == [("nvlink", "nvlink", 8, 450e9)]
    assert cluster(8, "h100").levels[0].switch_reduces


def test_several_dgx_h100_add_a_400_gbit_nic_per_gpu():
    made = cluster(64, "h100")
    assert levels(64, "h100")[1] == ("network", "infiniband", 64, 400e9 / 8)
    assert (made.name, made.nodes, made.gpus_per_node) == ("dgx_h100", 8, 8)
    assert made.host_memory_bytes == 2 * 2**40


def test_nvlink_of_an_nvl72_rack_spans_nodes():
    # GB200 NVL72: 18 trays of 4 GPUs in one NVLink domain, 1.8 TB/s both ways
    assert levels(72, "gb200") == [("nvlink", "nvlink", 72, 900e9)]
    assert levels(144, "gb200") == [("nvlink", "nvlink", 72, 900e9), ("network", "infiniband", 144, 50e9)]
    assert cluster(72, "gb200").nodes == 18


def test_one_gpu_has_no_topology():
    assert cluster(1, "h100").levels == () and cluster(1, "cpu").levels == ()


def test_part_of_a_node_is_a_smaller_domain():
    assert levels(4, "a100") == [("nvlink", "nvlink", 4, 300e9)]
    assert cluster(4, "a100").gpus_in_node == 4


def test_a_pair_on_a_mesh_has_one_link():
    # AMD MI300X: seven Infinity Fabric links of 128 GB/s both ways, one to each peer
    assert levels(2, "mi300x") == [("xgmi", "xgmi", 2, 64e9)]
    assert levels(8, "mi300x") == [("xgmi", "xgmi", 8, 7 * 64e9)]


@pytest.mark.parametrize(("name", "kind", "bytes_per_s"), [
    ("dgx_a100_80gb", "infiniband", 25e9),        # 8 HDR NICs of 200 Gb/s
    ("aws_p4d_24xlarge", "efa", 6.25e9),          # 400 Gb/s a node
    ("aws_p5_48xlarge", "efa", 50e9),             # 3,200 Gb/s a node
    ("gcp_a2_highgpu_8g", "ethernet", 1.5625e9),  # 100 Gb/s a node
    ("gcp_a3_highgpu_8g", "tcpx", 12.5e9),        # four 200 Gb/s NICs a node
    ("gcp_a3_ultragpu_8g", "roce", 50e9),         # 3,200 Gb/s a node
    ("dgx_b300", "infiniband", 100e9),            # 8 NICs of 800 Gb/s
])
def test_the_network_share_is_the_instance_documentation_s(name, kind, bytes_per_s):
    assert levels(16, name=name)[1] == ("network", kind, 16, bytes_per_s)


def test_boards_that_no_nvlink_joins_meet_over_pcie():
    """Two boards of four A100 (12 NVLinks to 3 peers, PCIe 4), four 100 Gb/s Omni-Path links a node of eight: the machine of BLOOM."""
    assert levels(16, name="jean_zay_a100") == [("nvlink", "nvlink", 4, 300e9), ("boards", "pcie", 8, 31.5e9), ("network", "infiniband", 16, 6.25e9)]
    assert levels(4, name="jean_zay_a100") == [("nvlink", "nvlink", 4, 300e9)]


def test_fewer_ranks_on_a_node_share_a_common_nic_but_not_the_rails():
    assert levels(4, name="gcp_a3_highgpu_8g", gpus_per_node=2)[1][3] == 25e9  # a whole 200 Gb/s NIC each, not two
    assert levels(4, name="dgx_h100", gpus_per_node=2)[1][3] == 50e9


def test_pcie_cards_sit_in_an_assumed_box_of_eight():
    assert levels(16, "l4") == [("pcie", "pcie", 8, 31.5e9), ("network", "ethernet", 16, 12.5e9 / 8)]  # PCIe 4 x16; one 100 Gb/s NIC
    assert node_shape("pcie_8gpu").confidence == "inferred"
    assert not cluster(8, "h100_pcie").levels[0].switch_reduces


def test_variants_of_a_board_use_its_node():
    assert cluster(16, "H100-SXM-96GB-HBM2e-500W").name == "dgx_h100"
    assert levels(8, "h800") == [("nvlink", "nvlink", 8, 200e9)]  # export variant: 400 GB/s both ways
    assert cluster(8, "h200", name="dgx_h200").accelerator.name == "h200_sxm"


def test_ranks_of_a_cpu_host_share_its_cores_and_memory():
    one, two, four = cluster(1, "cpu"), cluster(2, "cpu"), cluster(4, "cpu")
    assert [made.accelerator.memory_bytes / 2**30 for made in (one, two, four)] == [23, 11.5, 5.75]
    assert [made.accelerator.flops_per_s["fp32"] for made in (one, two, four)] == [143e9, 143e9, 71.5e9]
    assert [made.gpus_per_node for made in (one, two, four)] == [1, 2, 4]
    assert two.levels[0].kind == "shm" and two.accelerator == accelerator("cpu")


def test_nodes_alone_are_enough():
    assert cluster(nodes=4, gpu="h100").gpus == 32
    assert cluster(nodes=4, gpu="h100", gpus_per_node=2).gpus == 8
    assert cluster(8, gpu="h100", nodes=4).gpus_per_node == 2


@pytest.mark.parametrize(("arguments", "text"), [
    ({"gpus": 12, "gpu": "h100"}, "cluster.gpus = 12: more than one node is used whole: gpus must be a multiple of gpus_per_node = 8. Use gpus = 8 or 16."),
    ({"gpus": 16, "gpu": "h100", "nodes": 3, "gpus_per_node": 8},
     "cluster.gpus = 16: nodes * gpus_per_node = 3 * 8 = 24. Use gpus = 24, or leave one of the three out."),
    ({"gpus": 16, "gpu": "h100", "gpus_per_node": 16},
     "cluster.gpus_per_node = 16: one dgx_h100 node holds 8 GPUs, not 16. Use gpus_per_node = 8, or another node shape."),
    ({"gpus": 16, "gpu": "h100", "nodes": 1}, "cluster.nodes = 1: one dgx_h100 node holds 8 GPUs, not 16. Use nodes = 2, or another node shape."),
    ({"gpus": 16, "gpu": "h100", "nodes": 3},
     "cluster.gpus = 16: 3 nodes are used evenly, so gpus must be a multiple of nodes. Use gpus = 15, or leave nodes out."),
    ({"gpus": 8, "gpu": "a100", "name": "dgx-h100"},
     'cluster.gpu = a100: dgx_h100 holds h100_sxm, not a100_sxm_80gb. Use gpu = "h100_sxm", or name = "dgx_a100_80gb".'),
    ({"gpus": 8, "name": "pcie_8gpu", "gpu": "h100"},
     'cluster.gpu = h100: pcie_8gpu holds PCIe cards, not h100_sxm. Use gpu = "h100_pcie", or name = "dgx_h100".'),
    ({"gpus": 8, "name": "pcie_8gpu"}, 'cluster.gpu = None: pcie_8gpu takes any PCIe card, so the card must be named. Use gpu = "l4".'),
    ({"gpus": 8}, 'cluster.gpu = None: a cluster needs an accelerator or a node shape. Use gpu = "h100" or name = "dgx_h100".'),
    ({"gpus": 0, "gpu": "h100"}, "cluster.gpus = 0: a job has at least one rank on one node. Use gpus = 1."),
    ({"gpu": "h100"}, "cluster.gpus = None: a cluster needs a number of GPUs or of nodes. Use gpus = 8."),
])
def test_contradictions_are_refused_with_a_value_that_works(arguments, text):
    with pytest.raises(PlanError) as error:
        cluster(**arguments)
    assert str(error.value) == text


@given(gpus=st.integers(1, 300), gpu=st.sampled_from(["h100", "gb200", "l4", "gh200", "mi300x", "cpu"]))
def test_levels_grow_outwards_and_the_last_joins_all(gpus, gpu):
    try:
        made = cluster(gpus, gpu)
    except PlanError as error:
        full = node_shape(cluster(1, gpu).name).gpus_per_node
        assert f"Use gpus = {gpus // full * full}" in error.fix
        return
    domains = [level.domain for level in made.levels]
    assert domains == sorted(set(domains)) and 1 not in domains
    assert max(domains, default=1) == gpus

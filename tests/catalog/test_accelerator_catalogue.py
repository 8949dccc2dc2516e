"""Rates are held against the vendors' data sheets: dense peaks, links one way (data sheets print both ways)."""

import pytest

from costmodel.catalog import accelerator, accelerator_entry, cluster, list_accelerators, node_shape
from costmodel.catalog.files import entry_names

NAMES = entry_names("accelerators")


def test_all_accelerators_load_and_have_a_default_node():
    assert len(NAMES) == 48
    for name in NAMES:
        device = accelerator(name)
        assert device.name == name and device.source
        assert node_shape(accelerator_entry(name).node).gpus_per_node >= 1
        assert cluster(16, gpu=name).gpus == 16


@pytest.mark.parametrize(("name", "bf16_tflops", "memory_gb", "memory_tb_per_s", "link_gb_per_s_both_ways"), [
    ("a100_sxm_80gb", 312, 80, 2.039, 600),     # NVIDIA A100 data sheet
    ("h100_sxm", 989.4, 80, 3.35, 900),         # NVIDIA H100 data sheet (1,979 with sparsity)
    ("h200_sxm", 989.4, 141, 4.8, 900),         # NVIDIA H200 data sheet
    ("b200_sxm", 2250, 180, 7.7, 1800),         # NVIDIA DGX B200 data sheet: 72 PFLOP/s of sparse FP8 for 8 GPUs
    ("gb200", 2500, 186, 8.0, 1800),            # NVIDIA GB200 NVL72 data sheet (5 PFLOP/s with sparsity per GPU)
    ("mi300x", 1307.4, 192, 5.3, 896),          # AMD Instinct MI300X data sheet: 7 Infinity Fabric links of 128 GB/s
    ("l4", 121, 24, 0.300, 63),                 # NVIDIA L4 data sheet: PCIe 4 x16
])
def test_rates_are_those_of_the_data_sheet(name, bf16_tflops, memory_gb, memory_tb_per_s, link_gb_per_s_both_ways):
    device = accelerator(name)
    assert device.flops_per_s["bf16"] == pytest.approx(bf16_tflops * 1e12)
    assert device.memory_bytes_per_s == pytest.approx(memory_tb_per_s * 1e12)
    assert 2 * device.link_bytes_per_s == pytest.approx(link_gb_per_s_both_ways * 1e9)
    assert memory_gb * 0.93e9 < device.memory_bytes < memory_gb * 1.08e9


def test_memory_is_what_the_driver_reports_where_it_is_known():
    assert accelerator("h100").memory_bytes == 81_559 * 2**20  # nvidia-smi on an H100 SXM 80 GB
    assert accelerator("gb200").memory_bytes == 189_471 * 2**20


def test_a_dtype_without_hardware_is_missing_not_zero():
    assert "bf16" not in accelerator("v100").flops_per_s
    assert "fp8" not in accelerator("a100").flops_per_s
    assert all(rate > 0 for name in NAMES for rate in accelerator(name).flops_per_s.values())


def test_only_hopper_and_later_switches_reduce():
    # NVLink SHARP came with the third-generation NVSwitch (NVIDIA H100 architecture whitepaper)
    assert accelerator("h100").switch_reduces and accelerator("gb200").switch_reduces
    assert not any(accelerator(name).switch_reduces for name in ("a100", "h100_pcie", "mi300x", "4090"))


def test_one_mi250x_device_is_one_die():
    # AMD MI250X data sheet: 383 TFLOP/s of bf16, 128 GB and 3.2768 TB/s for the module of two dies
    die = accelerator("mi250x")
    assert die.flops_per_s["bf16"] == pytest.approx(383e12 / 2)
    assert die.memory_bytes == 64 * 2**30


@pytest.mark.parametrize(("name", "kind"), [("h100", "cuda"), ("mi300x", "rocm"), ("gaudi2", "hpu"), ("tpu_v5e", "tpu"), ("cpu", "cpu")])
def test_kinds_follow_the_vendor(name, kind):
    assert accelerator(name).kind == kind


def test_cpu_hosts_can_be_predicted_with_the_cpu_kernels():
    assert accelerator("cpu").kernel_table == "cpu"
    assert accelerator("cpu").flops_per_s == {"fp32": 143e9, "bf16": 1050e9}  # torch 2.13 GEMM on one thread, measured


def test_the_list_says_which_are_predictable_and_how_sure_their_rates_are():
    entries = {entry.name: entry for entry in list_accelerators()}
    assert set(entries) == set(NAMES)
    assert {entry.confidence for entry in entries.values()} == {"read", "partly_read", "recalled", "inferred", "measured"}
    assert {entry.vendor for entry in entries.values() if not entry.predictable} == {"google"} | {entries["gaudi2"].vendor}
    assert entries["tpu_v4"].why_not.startswith("the TPU's runtime") and entries["h100_sxm"].predictable

"""The kernel report: what it selects, counts and refuses."""

import io
import json
import sys

import pytest
import rich.console

from experiments import kernel_figures
from pallas_kernels import cuda_compile
from pallas_kernels.cuda_compile import A100, H200, Compiled


def case():
    (found,) = kernel_figures.selected_cases(["sliding_window"], ["embedded-dflash2 B=1"])
    return found


def test_selection_is_by_the_start_of_a_name():
    every = kernel_figures.selected_cases([], [])
    some = kernel_figures.selected_cases(["paged_attention.tree"], [])
    assert {c.op for c in some} == {"paged_attention.tree"} and len(some) < len(every)
    with pytest.raises(ValueError, match="nothing fits.*paged_attention.verify.*27b-dflash2 B=1"):
        kernel_figures.selected_cases(["conv3d"], [])


def test_counts_of_a_small_case():
    # Float32, one row, 8 columns, 6 query heads on 2 key heads of 32, 255 positions are seen.
    found = case()
    queries, keys = 8 * 6 * 32, (255 + 8) * 2 * 32
    assert found.minimum_bytes == 4 * (2 * queries + 2 * keys)
    assert found.flops == 2 * 2 * 6 * 8 * 32 * (255 + 8)
    # 24 of 32 rows are used; one program a key head reads everything once.
    assert found.moved_bytes == found.minimum_bytes
    memory, arithmetic = kernel_figures.floor_seconds(found, H200)
    assert memory == pytest.approx(found.minimum_bytes / 4.8e12)
    assert arithmetic == pytest.approx(found.flops / 989e12)


def test_report_without_compilers():
    row = kernel_figures.figures(case(), gpus=(A100, H200), compiling=False)
    assert [kernel["architecture"] for kernel in row["kernels"]] == ["sm_80", "sm_90"]
    assert row["failures"] == [] and row["gpus"]["NVIDIA H200"]["memory_floor_s"] > 0
    text = io.StringIO()
    kernel_figures.print_report(rich.console.Console(file=text, width=160), [row])
    assert "embedded-dflash2 B=1" in text.getvalue() and "sm_90" in text.getvalue()
    json.dumps(row)


def test_spills_and_too_much_shared_memory_are_failures():
    good = Compiled(64, 0, 0, A100.shared_bytes, 1, True)
    assert kernel_figures.failures("k", good, A100) == []
    bad = Compiled(255, 16, 16, A100.shared_bytes + 1, 1, True)
    spills, shared = kernel_figures.failures("k", bad, A100)
    assert "k sm_80: spills 16 bytes" in spills and "166913" in shared
    # What is too much for an A100 can be right for an H200.
    assert kernel_figures.failures("k", Compiled(64, 0, 0, 166913, 1, True), H200) == []


def test_the_script_says_what_is_missing(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    assert "pip install" in cuda_compile.missing_tools()
    assert script("kernel_report")("--shapes=embedded") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "triton" in error and "--lower_only" in error

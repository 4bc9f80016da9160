"""The certificate as a user runs it: one page, JSON, an exit code."""

import json

import pytest


@pytest.mark.slow
def test_the_short_certificate_passes(tmp_path, capsys, script):
    file = tmp_path / "certificate.json"
    assert script("certify")("--short", f"--json={file}") == 0
    shown = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["passed"] and "PASSED" in shown and "FAILED" not in shown
    kinds = {(check["check"], check["draft"]) for check in report["checks"]}
    toys = {
        (check, draft) for check in ("closed form", "samples") for draft in ("DFlash", "DFlash2")
    }
    pair = {(check, "tiny-dflash2") for check in ("first token", "next token", "three tokens")}
    assert kinds == toys | pair
    assert all(c["difference"] <= 1e-6 for c in report["checks"] if c["check"] == "closed form")
    assert sum(check.get("trials", 0) for check in report["checks"]) > 30_000
    assert len(shown.splitlines()) < 60  # one page


@pytest.mark.slow
def test_a_failed_certificate_has_another_exit_code(monkeypatch, capsys, script):
    run = script("certify")
    failed = [{"check": "samples", "draft": "DFlash2", "trials": 9, "p": 1e-9}]
    monkeypatch.setattr(run.module, "certify_toys", lambda *args: failed)
    monkeypatch.setattr(run.module, "certify_samples", lambda *args: [])
    assert run("--short") == 1
    assert "FAILED" in capsys.readouterr().out

"""What doctor finds out about packages."""

from typing import Any

from headrace.observe import import_probe


def found(name: str) -> dict[str, Any]:
    lines: list[Any] = []
    import_probe.probe([name], lines.append)
    return dict(lines[-1])


def test_a_package_that_is_only_read_from_is_usable_though_it_could_not_be_imported(tmp_path, monkeypatch) -> None:
    (tmp_path / "carrier_of_a_file.py").write_text("import something_that_is_nowhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    imported = found("carrier_of_a_file")
    assert not imported["ok"]
    assert "something_that_is_nowhere" in imported["reason"]
    monkeypatch.setattr(import_probe, "DATA_PACKAGES", frozenset({"carrier_of_a_file", "that_is_nowhere"}))
    assert found("carrier_of_a_file")["ok"]
    assert found("that_is_nowhere")["reason"] == "not installed"

"""Entry points are found by scanning directories, as installers leave them."""

from __future__ import annotations

from pathlib import Path

from rl_harness.discovery import EntryPoint, canonical, entry_points


def put(site: Path, info: str, entry_points_txt: str | None = None, **files: str) -> None:
    directory = site / info
    directory.mkdir(parents=True)
    if entry_points_txt is not None:
        (directory / "entry_points.txt").write_text(entry_points_txt)
    for name, text in files.items():
        (directory / name.replace("_", "-")).write_text(text)


def test_entry_points_of_the_group_are_read_with_distribution_and_version(tmp_path: Path) -> None:
    put(
        tmp_path,
        "Acme_Boxes-1.2.dist-info",
        "[other]\na = b\n[rl_harness]\n# boxes\nboxes = acme.boxes:plugin [extra]\n",
    )
    assert entry_points([str(tmp_path)]) == [EntryPoint("boxes", "acme.boxes:plugin", "acme-boxes", "1.2")]


def test_distributions_without_the_group_or_without_entry_points_have_none(tmp_path: Path) -> None:
    put(tmp_path, "plain-1.dist-info")
    put(tmp_path, "scripts-1.dist-info", "[console_scripts]\nrl_harness = x:y\n")
    assert entry_points([str(tmp_path)]) == []


def test_the_first_of_two_installations_counts_as_it_does_for_imports(tmp_path: Path) -> None:
    put(tmp_path / "first", "acme-2.0.dist-info", "[rl_harness]\nnew = acme.new\n")
    put(tmp_path / "second", "acme-1.0.dist-info", "[rl_harness]\nold = acme.old\n")
    found = entry_points([str(tmp_path / "first"), str(tmp_path / "second"), str(tmp_path / "first")])
    assert [(point.name, point.version) for point in found] == [("new", "2.0")]


def test_a_source_tree_on_the_path_counts_with_its_egg_info(tmp_path: Path) -> None:
    put(tmp_path, "acme.egg-info", "[rl_harness]\nboxes = acme\n", PKG_INFO="Metadata-Version: 2.1\nVersion: 3.1\n")
    assert entry_points([str(tmp_path)]) == [EntryPoint("boxes", "acme", "acme", "3.1")]


def test_zip_files_and_missing_directories_on_the_path_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "python.zip").write_bytes(b"PK")
    assert entry_points([str(tmp_path / "python.zip"), str(tmp_path / "gone")]) == []


def test_our_own_distributions_are_found_also_when_installed_editable() -> None:
    assert {"rl-harness", "rl-harness-torch"} <= {point.distribution for point in entry_points()}


def test_names_are_compared_in_their_canonical_form() -> None:
    assert canonical("Acme__Boxes.X") == "acme-boxes-x"

"""Servers are unpacked from Debian packages into a folder, and what cannot be had is said in one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from oncekey.testing.servers import (
    DynaliteServer,
    MysqlServer,
    OracleMysqlServer,
    ServerUnavailable,
    binaries,
    packages,
)

needs_debian = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not on this machine")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for servers."""
    monkeypatch.setenv("ONCEKEY_SERVERS", str(tmp_path / "servers"))
    return tmp_path / "servers"


def apt_that(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str = "apt-get") -> None:
    """An ``apt-get`` of this test's own, since tests do not use the network."""
    program = tmp_path / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def toy_package(folder: Path) -> None:
    built = folder / "toy"
    (built / "DEBIAN").mkdir(parents=True)
    (built / "usr/sbin").mkdir(parents=True)
    (built / "usr/sbin/toy").write_text("a server")
    (built / "DEBIAN/control").write_text(
        "Package: toy\nVersion: 1\nArchitecture: all\nMaintainer: nobody <n@example.org>\nDescription: a toy\n"
    )
    subprocess.run(["dpkg-deb", "-b", str(built), str(folder / "toy_1_all.deb")], check=True, capture_output=True)


@needs_debian
def test_fetch_unpacks_packages_into_the_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_package(tmp_path)
    apt_that(f'test "$*" = "download -qq toy" && cp {tmp_path}/toy_1_all.deb .', tmp_path, monkeypatch)
    monkeypatch.setattr(packages, "PACKAGES", {"toy": ("toy",)})
    monkeypatch.setattr(packages, "NPM_PACKAGES", {})
    said: list[str] = []

    assert packages.unpacked("toy") is None
    assert packages.main(said.append) == 0
    root = packages.unpacked("toy")

    assert root == home / "toy"
    assert (root / "usr/sbin/toy").read_text() == "a server"
    assert [path.name for path in home.iterdir()] == ["toy"]
    assert "fetched" in "".join(said)
    said.clear()
    assert packages.main(said.append) == 0
    assert "is in" in "".join(said)


def test_fetch_that_fails_names_the_command_and_fetches_the_others(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apt_that("echo 'E: Unable to locate package' >&2; exit 100", tmp_path, monkeypatch)
    monkeypatch.setattr(packages, "PACKAGES", {"one": ("one",), "two": ("two",)})
    monkeypatch.setattr(packages, "NPM_PACKAGES", {})
    said: list[str] = []

    assert packages.main(said.append) == 1

    assert "".join(said).count("apt-get download failed (E: Unable to locate package)") == 2
    assert packages.unpacked("one") is None


@needs_debian
def test_server_of_another_suite_is_fetched_only_if_it_is_named(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lists are its own: what this machine has of them stays as it is."""
    toy_package(tmp_path)
    script = f"""
        echo "$@" >> {tmp_path}/asked
        for word in "$@"; do
            case $word in
                indextargets) echo http://debian.example/; exit 0;;
                Dir::Etc::SourceList=*) cat ${{word#*=}} >> {tmp_path}/sources;;
                update) exit 0;;
                download) cp {tmp_path}/toy_1_all.deb .; exit 0;;
            esac
        done
        exit 1
    """
    apt_that(script, tmp_path, monkeypatch)
    monkeypatch.setattr(packages, "PACKAGES", {"toy": ("toy",)})
    monkeypatch.setattr(packages, "SUITES", {"toy": "sid"})
    monkeypatch.setattr(packages, "NPM_PACKAGES", {})

    assert packages.main(lambda said: None) == 0
    assert packages.unpacked("toy") is None
    assert packages.main(lambda said: None, ["toy"]) == 0
    assert packages.unpacked("toy") == home / "toy"

    assert set((tmp_path / "sources").read_text().splitlines()) == {"deb http://debian.example/ sid main"}
    place, update, download = (tmp_path / "asked").read_text().splitlines()
    assert "indextargets" in place
    assert f"Dir::State::Lists={home}" in update
    assert f"Dir::State::Lists={home}" in download


def test_server_of_an_unknown_name_is_refused_with_the_known_ones(home: Path) -> None:
    said: list[str] = []
    assert packages.main(said.append, ["oracle"]) == 2
    assert "mariadb, mysql" in "".join(said)


def test_server_of_npm_is_fetched_into_the_folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        'test "$1 $2" = "install --prefix" && mkdir -p $3/node_modules/toy && echo server > $3/node_modules/toy/cli.js'
    )
    apt_that(script, tmp_path, monkeypatch, name="npm")
    monkeypatch.setattr(packages, "PACKAGES", {})
    monkeypatch.setattr(packages, "NPM_PACKAGES", {"toy": ("toy@1",)})

    assert packages.main(lambda said: None) == 0

    assert (home / "toy/node_modules/toy/cli.js").read_text() == "server\n"


def test_dynalite_that_is_nowhere_names_make_servers(home: Path) -> None:
    with pytest.raises(ServerUnavailable, match="make servers"):
        DynaliteServer().start()


def test_mysql_that_is_nowhere_names_make_servers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_MYSQL", "no-such-server")
    with pytest.raises(ServerUnavailable, match="make servers ARGS=mysql"):
        OracleMysqlServer().start()


def test_server_that_is_nowhere_names_make_servers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "_MARIADB", ("sbin/no-such-server",))
    with pytest.raises(ServerUnavailable, match="make servers"):
        MysqlServer().start()

"""Write the bill of materials of oncekey with all extras, as CycloneDX JSON: ``make sbom``.

The components are what ``pip install 'oncekey[all]'`` brings: the packages that pyproject.toml names, what these need,
and so on, in the versions that are installed in ``.venv`` (the pins of requirements/dev.txt). Tools for tests and lint
are not part of it. Each component says in the property ``oncekey:extra`` which extras bring it; ``(always)`` is the
package without extras. The file is validated against the schema of CycloneDX before it is written.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
ALWAYS = "(always)"
NOT_INSTALLED = 1
LICENSE_FIELDS = ("License-Expression", "License")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass
class Bill:
    """Packages by canonical name."""

    extras: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The extras that bring a package."""
    needs: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    missing: set[str] = field(default_factory=set)


def wanted(lines: Iterable[str], extras: frozenset[str]) -> Iterable[Requirement]:
    """Those of these requirements that hold on this platform, with these extras."""
    for line in lines:
        requirement = Requirement(line)
        environments = [{"extra": extra} for extra in extras or {""}]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
            yield requirement


def bill_of(project: Mapping[str, Any], installed: Mapping[str, Distribution]) -> Bill:
    """Everything that the extras of a project bring."""
    own = canonical(project["name"])
    groups: dict[str, list[str]] = {ALWAYS: project["dependencies"], **project["optional-dependencies"]}
    bill = Bill()

    def add(parent: str, requirement: Requirement, extra: str, seen: set[tuple[str, frozenset[str]]]) -> None:
        name, asked = canonical(requirement.name), frozenset(requirement.extras)
        if name == own:  # demo = ["oncekey[cli]"]
            for group in asked:
                for each in wanted(groups[group], frozenset()):
                    add(own, each, extra, seen)
            return
        bill.needs[parent].add(name)
        bill.extras[name].add(extra)
        if (name, asked) in seen:
            return
        seen.add((name, asked))
        if name not in installed:
            bill.missing.add(name)
            return
        for each in wanted(installed[name].requires or (), asked):
            add(name, each, extra, seen)

    for extra, lines in groups.items():
        seen: set[tuple[str, frozenset[str]]] = set()
        for requirement in wanted(lines, frozenset()):
            if extra != "all":
                add(own, requirement, extra, seen)
    return bill


def document(project: Mapping[str, Any], installed: Mapping[str, Distribution], bill: Bill) -> str:
    """The bill as validated CycloneDX JSON."""
    from cyclonedx.model import Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.license import DisjunctiveLicense
    from cyclonedx.output.json import JsonV1Dot6
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from packageurl import PackageURL

    def component(name: str, version: str, license_text: str, properties: list[Property]) -> Component:
        return Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=version,
            bom_ref=f"{name}=={version}",
            purl=PackageURL("pypi", None, name, version),
            licenses=[DisjunctiveLicense(name=license_text)] if license_text else [],
            properties=properties,
        )

    own = component(canonical(project["name"]), project["version"], project["license"], [])
    made = {own.name: own}
    for name, extras in sorted(bill.extras.items()):
        found = installed[name]
        said = next((found.metadata[field] for field in LICENSE_FIELDS if field in found.metadata), "")
        properties = [Property(name="oncekey:extra", value=extra) for extra in sorted(extras)]
        made[name] = component(name, found.version, said.strip().partition("\n")[0], properties)
    bom = Bom(components=[each for each in made.values() if each is not own])
    bom.metadata.component = own
    for name, value in (("python", platform.python_version()), ("platform", sys.platform)):
        bom.metadata.properties.add(Property(name=f"oncekey:{name}", value=value))
    for name, needs in bill.needs.items():
        bom.register_dependency(made[name], [made[each] for each in needs])
    text: str = JsonV1Dot6(bom).output_as_string(indent=2)
    if (errors := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise SystemExit(f"sbom: what was made is not valid CycloneDX: {errors}")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make sbom", description=__doc__.partition("\n")[0])
    parser.add_argument("--packages", type=Path, required=True, help="site-packages that has the pins of dev.txt")
    options = parser.parse_args(arguments)
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    installed = {canonical(found.name): found for found in distributions(path=[str(options.packages)])}
    bill = bill_of(project, installed)
    if bill.missing:
        print(
            f"sbom: not installed in {options.packages}: {', '.join(sorted(bill.missing))}. Run make lint, which does"
        )
        return NOT_INSTALLED
    path = ROOT / "dist" / f"{project['name']}-{project['version']}.cdx.json"
    text = document(project, installed, bill)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")
    print(f"sbom: {path.relative_to(ROOT)}, CycloneDX 1.6, valid: oncekey and {len(bill.extras)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())

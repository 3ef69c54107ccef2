"""SKILL.md, the rules for programs that write code: each rule leads to a section that exists, which proves it."""

import re

import yaml
from conftest import ROOT
from test_questions import sections_of

_, FRONT_MATTER, TEXT = (ROOT / "SKILL.md").read_text(encoding="utf-8").split("---\n", 2)
RULES = re.findall(r"(?m)^- .*$", TEXT)
LINK = re.compile(r"\]\(([^)#]+)#([^)]+)\)")


def test_its_front_matter_has_a_name_and_says_when_to_use_it():
    skill = yaml.safe_load(FRONT_MATTER)
    assert set(skill) == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9-]{1,64}", skill["name"])
    assert "Use when" in skill["description"]
    assert len(skill["description"]) <= 1024


def test_each_rule_ends_with_a_link_to_a_section_that_exists():
    assert len(RULES) > 40
    for rule in RULES:
        links = LINK.findall(rule)
        assert links, rule
        assert rule.endswith(")"), rule
        for file, anchor in links:
            assert (ROOT / file).exists(), rule
            assert anchor in sections_of(file), rule


def test_each_of_its_links_leads_to_a_file():
    for address in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (ROOT / address.partition("#")[0]).exists(), address

"""Defects in what is not compiled: the report, the diagnosis, release tools, workflows, Makefile, docs and examples."""

from __future__ import annotations

from .mutation import Mutation

BUILD, RELEASE, SERVER = "tools/build.py", "tools/release.py", "tests/hub_server.py"
RELEASE_YML, BUILD_YML = ".github/workflows/release.yml", ".github/workflows/build.yml"
PACKAGE = "torch-ext/ltx_kernels/"
DEMO, COMMAND_LINE = "examples/demo.py", "examples/command_line.py"


def defect(name: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(name, file, old, new, tests, ("tools",))


TOOL_DEFECTS = [
    defect(
        "one reason shown of several for stock calls",
        PACKAGE + "integrations/_report.py",
        "for reason, count in reasons.items()]",
        "for reason, count in list(reasons.items())[:1]]",
        "report",
    ),
    defect(
        "stock calls counted as the ops' calls too",
        PACKAGE + "integrations/_sites.py",
        "            self.fallbacks[reason] += 1",
        "            self.fallbacks[reason] += 1\n            self.calls += 1",
        "report",
    ),
    defect(
        "reasons counted in the place of stock calls",
        PACKAGE + "integrations/_report.py",
        "str(sum(s.fallbacks.values()))",
        "str(len(s.fallbacks))",
        "report",
    ),
    defect(
        "modules left alone that the report does not count",
        PACKAGE + "integrations/_report.py",
        'f" and {len(names) - 3} more" if len(names) > 3 else ""',
        '""',
        "report",
    ),
    defect(
        "a diagnosis that does not look at the result",
        PACKAGE + "__main__.py",
        "return None if error < 1e-5 else",
        "return None if error >= 0 else",
        "project_files::test_diagnosis_of_a_wrong_or_failing_op",
    ),
    defect(
        "files in a release that its digest does not name",
        RELEASE,
        "        if name not in (directories if path.is_dir() else signed | beside):\n",
        "        if False:\n",
        "build_release",
    ),
    defect("links in a release", RELEASE, "        if path.is_symlink():\n", "        if False:\n", "build_release"),
    defect(
        "a release under another licence",
        RELEASE,
        '        ("license", metadata.get("license"), project.license),\n',
        "",
        "build_release",
    ),
    defect(
        "a release of another commit",
        RELEASE,
        '        ("commit", kernel.get("commit"), commit),\n',
        "",
        "build_release",
    ),
    defect(
        "sources in a release that its commit does not have",
        RELEASE,
        "if file.read_bytes() != (variant / name).read_bytes()",
        "if False",
        "build_release",
    ),
    defect(
        "release tags sorted as text",
        RELEASE,
        '"--sort=-version:refname"',
        '"--sort=-refname"',
        "build_release",
    ),
    defect(
        "an earlier variant's files kept",
        RELEASE,
        "    target = build / variant\n    shutil.rmtree(target, ignore_errors=True)\n",
        "    target = build / variant\n",
        "build_release",
    ),
    defect(
        "a changed default taken for compatible",
        RELEASE,
        "if before[name][1] not in (None, after[name][1])]",
        "if False]",
        "build_release",
    ),
    defect(
        "metadata of the first variant signed alone",
        RELEASE,
        'sorted(build.glob("*/metadata.json")):\n        builder.run',
        'sorted(build.glob("*/metadata.json"))[:1]:\n        builder.run',
        "build_release",
    ),
    defect(
        "a dirty build named by its commit",
        BUILD,
        "if git is not None and not git.dirty and not options.key:",
        "if git is not None and not options.key:",
        "build_local::test_identity_follows_git",
    ),
    defect(
        "a stale build taken for a new one",
        BUILD,
        "return made_here and recorded.read_text() != project.input_digest(backend)",
        "return False",
        "build_local::test_stale_builds_are_noticed",
    ),
    defect(
        "--arch ignored for the CPU",
        BUILD,
        'if options.archs and "cpu" in backends:',
        "if False:",
        "build_local::test_argument_errors",
    ),
    defect(
        "an undefined function left to the user's machine",
        BUILD,
        "    if missing:\n        names = run",
        "    if False:\n        names = run",
        "build_local::test_an_undefined_function_fails_the_build",
    ),
    defect(
        "nothing checked before signing",
        RELEASE_YML,
        "make check-complete sign",
        "make sign",
        "hub_workflows",
    ),
    defect("builds of an unchecked tag", RELEASE_YML, "    needs: check\n", "", "hub_workflows"),
    defect(
        "signatures without approval",
        RELEASE_YML,
        "    environment: release # its protection rules say who may release\n",
        "",
        "hub_workflows",
    ),
    defect(
        "the token in a step that does not upload",
        RELEASE_YML,
        "      - run: make check-complete\n        env:\n",
        "      - run: make check-complete\n        env:\n          HF_TOKEN: ${{ secrets.HF_TOKEN }}\n",
        "hub_workflows",
    ),
    defect(
        "gathered variants not checked together",
        BUILD_YML,
        "make check-complete check-variants",
        "make check-variants",
        "hub_workflows",
    ),
    defect("packages without hashes", "tools/venv.sh", "--require-hashes ", "", "hub_workflows"),
    defect(
        "a path with a space broken in two",
        "Makefile",
        'LOCAL := LOCAL_KERNELS="org/ltx-kernels=$(CURDIR)/build"',
        "LOCAL := LOCAL_KERNELS=org/ltx-kernels=$(CURDIR)/build",
        "build_makefile",
    ),
    defect(
        "a demo that builds every variant",
        "Makefile",
        "$(or $(BACKEND_ARG),--this-machine)",
        "$(BACKEND_ARG)",
        "build_makefile",
    ),
    defect(
        "arguments exchanged in the table of ops",
        "docs/ops.md",
        "`rope_3d(query, key, num_frames, height, width, theta_base)`",
        "`rope_3d(query, key, height, width, num_frames, theta_base)`",
        "docs::test_the_table_of_operations",
    ),
    defect(
        "a misspelt function in the docs",
        "docs/optimize.md",
        "`report = ltx.optimize(pipe)`",
        "`report = ltx.optimise(pipe)`",
        "docs::test_calls_fit_their_signatures",
    ),
    defect(
        "an option that no script has in the docs",
        "CONTRIBUTING.md",
        "--sanitize address,undefined",
        "--sanitise address,undefined",
        "docs::test_shell_blocks",
    ),
    defect(
        "the licence's heading removed",
        "LICENSE",
        "                                 Apache License\n                           Version 2.0, January 2004\n",
        "",
        "project_files::test_licence",
    ),
    defect(
        "a link to a page that is not there",
        "README.md",
        "[hub](docs/hub.md): variants",
        "[hub](docs/the-hub.md): variants",
        "project_files::test_links_lead_somewhere",
    ),
    defect(
        "a Hub server that leaves its store",
        SERVER,
        "return (root / below).resolve().is_relative_to(root.resolve())",
        "return True",
        "hub::test_the_server_keeps_to_its_store",
    ),
    defect(
        "Ctrl-C as a failure",
        COMMAND_LINE,
        'leave("interrupted", 130)',
        'leave("interrupted", 1)',
        "examples::test_ctrl_c",
    ),
    defect(
        "--help after ten seconds",
        "examples/inject_ltx.py",
        "import argparse\n",
        "import argparse\n\nimport diffusers\n",
        "examples::test_help_and_wrong_arguments_are_answered_at_once",
    ),
    defect(
        "a demo that does not look whether restore restores",
        DEMO,
        'if not result["restored_to_same_bits"]:',
        "if False:",
        "demo::test_faults_are_reported",
    ),
    defect(
        "the demo's errors against the wrong clip",
        DEMO,
        'pairs["ltx_kernels_to_float32"] = our_forward, ours, exact_forward, exact',
        'pairs["ltx_kernels_to_float32"] = our_forward, ours, stock_forward, stock',
        "demo::test_error_is_rounding_noise",
    ),
    defect(
        "the picture shows one clip twice",
        DEMO,
        '"ltx-kernels": ours, f"|difference|',
        '"ltx-kernels": stock, f"|difference|',
        "demo::test_rows_of_the_picture",
    ),
    defect(
        "the first step for the median step",
        "examples/generate_video.py",
        '"step_median": statistics.median(clip.steps)',
        '"step_median": clip.steps[0]',
        "examples::test_optimized_and_baseline",
    ),
]

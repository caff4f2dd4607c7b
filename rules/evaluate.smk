# SPDX-License-Identifier: Apache-2.0
# What the re-encoding cost, measured on the release's own files.


rule score:
    input:
        rows="<run>/rows/{panel}.safetensors",
        source="<run>/forward/source/{panel}/hidden.safetensors",
        release="<run>/forward/{recipe}/{panel}/hidden.safetensors",
    output:
        table="<run>/scores/{recipe}/{panel}.parquet",
        summary=report(
            "<run>/scores/{recipe}/{panel}.json",
            caption="../report/captions/summary.rst",
            category="Scores",
            labels={"release": "{recipe}", "panel": "{panel}", "file": "summary"},
        ),
        record="<run>/provenance/score/{recipe}.{panel}.json",
    log:
        "<run>/logs/score/{recipe}.{panel}.log",
    benchmark:
        "<run>/benchmarks/score/{recipe}.{panel}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: settings["forward"]["threads"]
    params:
        code=code("score"),
        source=settings["source"],
        release=lambda wildcards: f"{RUN}/release/{wildcards.recipe}",
        name=lambda wildcards: wildcards.recipe,
    message:
        "Score release {wildcards.recipe} against the source on panel {wildcards.panel}"
    script:
        "../workflow/scripts/score.py"


use rule score as score_floor with:
    input:
        rows="<run>/rows/{panel}.safetensors",
        source="<run>/forward/source/{panel}/hidden.safetensors",
        release=f"<run>/forward/{FLOOR}/{{panel}}/hidden.safetensors",
    output:
        table=f"<run>/scores/{FLOOR}/{{panel}}.parquet",
        summary=f"<run>/scores/{FLOOR}/{{panel}}.json",
        record="<run>/provenance/score_floor/{panel}.json",
    log:
        "<run>/logs/score_floor/{panel}.log",
    benchmark:
        "<run>/benchmarks/score_floor/{panel}.tsv"
    params:
        code=code("score"),
        source=settings["source"],
        release=settings["source"],
        name=FLOOR,
    message:
        "Score the source against itself with other sums, on panel {wildcards.panel}"


rule compare:
    input:
        table=rules.score.output.table,
    output:
        comparison=report(
            "<run>/compare/{recipe}/{panel}.json",
            caption="../report/captions/comparison.rst",
            category="Scores",
            labels={"release": "{recipe}", "panel": "{panel}", "file": "intervals"},
        ),
        record="<run>/provenance/compare/{recipe}.{panel}.json",
    log:
        "<run>/logs/compare/{recipe}.{panel}.log",
    benchmark:
        "<run>/benchmarks/compare/{recipe}.{panel}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("compare"),
        draws=settings["evaluate"]["draws"],
        seed=settings["evaluate"]["seed"],
        confidence=settings["evaluate"]["confidence"],
    message:
        "Intervals of release {wildcards.recipe} on panel {wildcards.panel}"
    script:
        "../workflow/scripts/compare.py"


use rule compare as compare_floor with:
    input:
        table=rules.score_floor.output.table,
    output:
        comparison=f"<run>/compare/{FLOOR}/{{panel}}.json",
        record="<run>/provenance/compare_floor/{panel}.json",
    log:
        "<run>/logs/compare_floor/{panel}.log",
    benchmark:
        "<run>/benchmarks/compare_floor/{panel}.tsv"
    message:
        "Noise floor of panel {wildcards.panel}"


use rule compare as compare_recipes with:
    input:
        table=rules.score.output.table,
        baseline="<run>/scores/{baseline}/{panel}.parquet",
    output:
        comparison=report(
            "<run>/compare/{recipe}/{baseline}/{panel}.json",
            caption="../report/captions/recipes.rst",
            category="Scores",
            labels={
                "release": "{recipe} minus {baseline}",
                "panel": "{panel}",
                "file": "intervals",
            },
        ),
        record="<run>/provenance/compare_recipes/{recipe}.{baseline}.{panel}.json",
    log:
        "<run>/logs/compare_recipes/{recipe}.{baseline}.{panel}.log",
    benchmark:
        "<run>/benchmarks/compare_recipes/{recipe}.{baseline}.{panel}.tsv"
    message:
        "Intervals of release {wildcards.recipe} against {wildcards.baseline} on {wildcards.panel}"


rule judge:
    input:
        comparisons=lambda wildcards: expand(
            rules.compare.output.comparison, recipe=wildcards.recipe, panel=PANELS
        ),
    output:
        verdict="<run>/gates/{recipe}.json",
        record="<run>/provenance/judge/{recipe}.json",
    log:
        "<run>/logs/judge/{recipe}.log",
    benchmark:
        "<run>/benchmarks/judge/{recipe}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("judge"),
        gates=settings["gates"],
    message:
        "Hold release {wildcards.recipe} against the gates"
    script:
        "../workflow/scripts/judge.py"


# After the report, so that it is there to say why.
rule enforce_gates:
    input:
        page="<run>/report/index.html",
        verdicts=expand(rules.judge.output.verdict, recipe=RECIPES),
    output:
        passed="<run>/gates/passed.json",
        record="<run>/provenance/enforce_gates/all.json",
    log:
        "<run>/logs/enforce_gates.log",
    benchmark:
        "<run>/benchmarks/enforce_gates.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("enforce_gates"),
    message:
        "Require that every release passes its gates"
    script:
        "../workflow/scripts/enforce_gates.py"


rule check_reference:
    input:
        hidden="<run>/forward/source/{panel}/hidden.safetensors",
    output:
        receipt="<run>/gates/reference/{panel}.json",
        record="<run>/provenance/check_reference/{panel}.json",
    log:
        "<run>/logs/check_reference/{panel}.log",
    benchmark:
        "<run>/benchmarks/check_reference/{panel}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("check_reference"),
        nll=lambda wildcards: settings["panels"][wildcards.panel]["source_nll"],
    message:
        "Is the source's NLL on panel {wildcards.panel} what it must be?"
    script:
        "../workflow/scripts/check_reference.py"


# What a reader of the release needs to recompute its loss; hard links, so it takes no room here.
rule certificate:
    input:
        receipt=rules.finish_release.output.receipt,
        rows=expand("<run>/rows/{panel}.safetensors", panel=PANELS),
        hidden=expand("<run>/forward/source/{panel}/hidden.safetensors", panel=PANELS),
        scores=expand(rules.score.output.table, panel=PANELS, allow_missing=True),
        comparison=expand(rules.compare.output.comparison, panel=PANELS, allow_missing=True),
        floor_scores=expand(rules.score_floor.output.table, panel=PANELS),
        floor=expand(rules.compare_floor.output.comparison, panel=PANELS),
    output:
        certificate="<run>/certificate/{recipe}/certificate.json",
        record="<run>/provenance/certificate/{recipe}.json",
    log:
        "<run>/logs/certificate/{recipe}.log",
    benchmark:
        "<run>/benchmarks/certificate/{recipe}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("certificate"),
        release=lambda wildcards: f"{RUN}/release/{wildcards.recipe}",
        panels=list(PANELS),
    message:
        "Certificate of release {wildcards.recipe}"
    script:
        "../workflow/scripts/certificate.py"

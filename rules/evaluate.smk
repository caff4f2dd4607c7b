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

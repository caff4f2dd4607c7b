# SPDX-License-Identifier: Apache-2.0
# Texts to token rows: splits that calibrate, panels that judge.


rule build_rows:
    input:
        tokenizer=f"{settings['source']}/tokenizer.json",
        texts=CALIBRATION_TEXTS,
    output:
        rows="<run>/rows/{split}.safetensors",
        receipt="<run>/rows/{split}.json",
        record="<run>/provenance/build_rows/{split}.json",
    log:
        "<run>/logs/build_rows/{split}.log",
    benchmark:
        "<run>/benchmarks/build_rows/{split}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("build_rows"),
        window=CALIBRATION["window"],
        windows=CALIBRATION["windows"],
        part=lambda wildcards: [number(wildcards.split), len(SPLITS)],
        separator=SEPARATOR,
    message:
        "Cut the texts of {wildcards.split} into windows of tokens"
    script:
        "../workflow/scripts/build_rows.py"


rule pick_rows:
    input:
        splits=expand(rules.build_rows.output.rows, split=SPLITS),
    output:
        rows="<run>/rows/probe.safetensors",
        receipt="<run>/rows/probe.json",
        record="<run>/provenance/pick_rows/probe.json",
    log:
        "<run>/logs/pick_rows.log",
    benchmark:
        "<run>/benchmarks/pick_rows.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("pick_rows"),
        windows=CALIBRATION["probe_windows"],
    message:
        "Pick the calibration rows that probes run on"
    script:
        "../workflow/scripts/pick_rows.py"


use rule build_rows as build_panel with:
    input:
        tokenizer=f"{settings['source']}/tokenizer.json",
        texts=lambda wildcards: PANEL_TEXTS[wildcards.panel],
        exclude=expand(rules.build_rows.output.rows, split=SPLITS),
    output:
        rows="<run>/rows/{panel}.safetensors",
        receipt="<run>/rows/{panel}.json",
        record="<run>/provenance/build_panel/{panel}.json",
    log:
        "<run>/logs/build_panel/{panel}.log",
    benchmark:
        "<run>/benchmarks/build_panel/{panel}.tsv"
    params:
        code=code("build_rows"),
        window=lambda wildcards: PANELS[wildcards.panel]["window"],
        windows=lambda wildcards: PANELS[wildcards.panel]["windows"],
        part=[0, 1],
        separator=SEPARATOR,
    message:
        "Cut the texts of panel {wildcards.panel} into windows of tokens"

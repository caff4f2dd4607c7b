# SPDX-License-Identifier: Apache-2.0
# The forward, one layer a job: captures of the calibration splits, hidden states of the panels.


rule capture:
    input:
        rows="<run>/rows/{split}.safetensors",
        state=state_before("<run>/forward/source/{split}"),
        weights=weights_of,
    output:
        state=temp("<run>/forward/source/{split}/{layer}.state.safetensors"),
        capture="<run>/captures/{split}/{layer}.safetensors",
        stats="<run>/forward/source/{split}/{layer}.stats.json",
        record="<run>/provenance/capture/{split}.{layer}.json",
    log:
        "<run>/logs/capture/{split}.{layer}.log",
    benchmark:
        "<run>/benchmarks/capture/{split}.{layer}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: settings["forward"]["threads"]
    params:
        code=code("capture"),
        checkpoint=checkpoint_folder,
        layer=lambda wildcards: number(wildcards.layer),
        wide=lambda wildcards: wildcards.get("checkpoint") == FLOOR,
        device=settings["forward"]["device"],
    message:
        "Run {wildcards.split} through {wildcards.layer} of the source and keep the FFN inputs"
    script:
        "../workflow/scripts/capture.py"


use rule capture as forward_probe with:
    input:
        rows="<run>/rows/probe.safetensors",
        state=state_before("<run>/forward/source/probe"),
        weights=weights_of,
    output:
        state=temp("<run>/forward/source/probe/{layer}.state.safetensors"),
        stats="<run>/forward/source/probe/{layer}.stats.json",
        record="<run>/provenance/forward_probe/{layer}.json",
    log:
        "<run>/logs/forward_probe/{layer}.log",
    benchmark:
        "<run>/benchmarks/forward_probe/{layer}.tsv"
    message:
        "Run the probes' rows through {wildcards.layer} of the source"


use rule capture as forward with:
    input:
        rows="<run>/rows/{panel}.safetensors",
        state=state_before("<run>/forward/{checkpoint}/{panel}"),
        weights=weights_of,
    output:
        state=temp("<run>/forward/{checkpoint}/{panel}/{layer}.state.safetensors"),
        stats="<run>/forward/{checkpoint}/{panel}/{layer}.stats.json",
        record="<run>/provenance/forward/{checkpoint}.{panel}.{layer}.json",
    log:
        "<run>/logs/forward/{checkpoint}.{panel}.{layer}.log",
    benchmark:
        "<run>/benchmarks/forward/{checkpoint}.{panel}.{layer}.tsv"
    message:
        "Run panel {wildcards.panel} through {wildcards.layer} of {wildcards.checkpoint}"


rule finish_forward:
    input:
        rows="<run>/rows/{panel}.safetensors",
        state=f"<run>/forward/{{checkpoint}}/{{panel}}/{LAYERS[-1]}.state.safetensors",
        weights=head_of,
    output:
        hidden="<run>/forward/{checkpoint}/{panel}/hidden.safetensors",
        record="<run>/provenance/finish_forward/{checkpoint}.{panel}.json",
    log:
        "<run>/logs/finish_forward/{checkpoint}.{panel}.log",
    benchmark:
        "<run>/benchmarks/finish_forward/{checkpoint}.{panel}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: settings["forward"]["threads"]
    params:
        code=code("finish_forward"),
        checkpoint=checkpoint_folder,
        device=settings["forward"]["device"],
    message:
        "Final hidden states of {wildcards.checkpoint} on panel {wildcards.panel}"
    script:
        "../workflow/scripts/finish_forward.py"


use rule finish_forward as finish_probe with:
    input:
        rows="<run>/rows/probe.safetensors",
        state=f"<run>/forward/source/probe/{LAYERS[-1]}.state.safetensors",
        weights=head_of,
    output:
        hidden="<run>/forward/source/probe/hidden.safetensors",
        record="<run>/provenance/finish_probe/source.json",
    log:
        "<run>/logs/finish_probe.log",
    benchmark:
        "<run>/benchmarks/finish_probe.tsv"
    message:
        "Final hidden states of the source on the probes' rows"

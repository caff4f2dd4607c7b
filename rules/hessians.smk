# SPDX-License-Identifier: Apache-2.0
# What the calibration says of each expert. The Hessians themselves are rebuilt where they are used.


rule hessians:
    input:
        captures=expand("<run>/captures/{split}/{{layer}}.safetensors", split=SPLITS),
    output:
        receipt="<run>/hessians/{layer}.json",
        record="<run>/provenance/hessians/{layer}.json",
    log:
        "<run>/logs/hessians/{layer}.log",
    benchmark:
        "<run>/benchmarks/hessians/{layer}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: settings["forward"]["threads"]
    params:
        code=code("hessians"),
        source=settings["source"],
        layer=lambda wildcards: number(wildcards.layer),
        down_weighting=settings["encode"]["down_weighting"],
    message:
        "Tokens, trace and rank of every Hessian of {wildcards.layer}"
    script:
        "../workflow/scripts/hessians.py"


rule clean_captures:
    log:
        "<run>/logs/clean_captures.log",
    localrule: True
    conda:
        "../envs/cpu.yaml"
    params:
        folder=f"{RUN}/captures",
    message:
        "Remove the captures; the target `captures` makes them again"
    shell:
        "rm -rf {params.folder:q} > {log:q} 2>&1"

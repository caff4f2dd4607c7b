# SPDX-License-Identifier: Apache-2.0
# Rates under a budget: what must be in the bank first, a draft, then the plan, frozen and hashed.


rule want_base:
    input:
        manifest=rules.inspect_source.output.manifest,
        statistics=lambda wildcards: (
            statistics_of(BASES[wildcards.base]) if "method" in BASES[wildcards.base] else []
        ),
    output:
        wanted=expand("<run>/wanted/{{base}}/{layer}.json", layer=LAYERS),
        record="<run>/provenance/want_base/{base}.json",
    log:
        "<run>/logs/want_base/{base}.log",
    benchmark:
        "<run>/benchmarks/want_base/{base}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("want_base"),
        recipe=lambda wildcards: BASES[wildcards.base],
    message:
        "List what {wildcards.base} needs in the bank"
    script:
        "../workflow/scripts/want_base.py"


rule draft_plan:
    input:
        ledgers=lambda wildcards: expand(
            rules.encode.output.ledger,
            wanted=base_name(RECIPES[wildcards.recipe]),
            layer=LAYERS,
            block=BLOCKS,
        ),
        statistics=lambda wildcards: statistics_of(RECIPES[wildcards.recipe]),
    output:
        wanted=expand("<run>/wanted/{{recipe}}.draft/{layer}.json", layer=LAYERS),
        record="<run>/provenance/draft_plan/{recipe}.json",
    log:
        "<run>/logs/draft_plan/{recipe}.log",
    benchmark:
        "<run>/benchmarks/draft_plan/{recipe}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("draft_plan"),
        recipe=lambda wildcards: RECIPES[wildcards.recipe],
    message:
        "Draft recipe {wildcards.recipe}: list what has to be measured before its plan"
    script:
        "../workflow/scripts/draft_plan.py"


rule freeze_plan:
    input:
        manifest=rules.inspect_source.output.manifest,
        ledgers=lambda wildcards: ledgers_of([wildcards.recipe]),
        statistics=lambda wildcards: statistics_of(RECIPES[wildcards.recipe]),
    output:
        plan=report(
            "<run>/plan/{recipe}.json",
            caption="../report/captions/plan.rst",
            category="Plans",
            labels={"release": "{recipe}"},
        ),
        record="<run>/provenance/freeze_plan/{recipe}.json",
    log:
        "<run>/logs/freeze_plan/{recipe}.log",
    benchmark:
        "<run>/benchmarks/freeze_plan/{recipe}.tsv"
    conda:
        "../envs/cpu.yaml"
    params:
        code=code("freeze_plan"),
        recipe=lambda wildcards: RECIPES[wildcards.recipe],
    message:
        "Freeze the plan of recipe {wildcards.recipe}"
    script:
        "../workflow/scripts/freeze_plan.py"

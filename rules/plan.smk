# SPDX-License-Identifier: Apache-2.0
# Rates under a budget: what must be in the bank first, a draft, then the plan, frozen and hashed.


rule want_base:
    input:
        # Nothing is encoded for a source whose forward is not believed.
        reference=expand("<run>/gates/reference/{panel}.json", panel=BELIEVED),
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


rule keep_state:
    input:
        rows=rules.pick_rows.output.rows,
        state=state_before("<run>/probes/{base}"),
        ledgers=lambda wildcards: ledgers_of_list(wildcards.base, [wildcards.layer]),
        weights=weights_of,
    output:
        # Kept: the probes of a later recipe with this base start from it.
        state="<run>/probes/{base}/{layer}.state.safetensors",
        record="<run>/provenance/keep_state/{base}.{layer}.json",
    log:
        "<run>/logs/keep_state/{base}.{layer}.log",
    benchmark:
        "<run>/benchmarks/keep_state/{base}.{layer}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: settings["forward"]["threads"]
    params:
        code=code("keep_state"),
        source=settings["source"],
        bank=settings["bank_store"],
        layer=lambda wildcards: number(wildcards.layer),
        rate=lambda wildcards: BASES[wildcards.base]["base_rate"],
        device=settings["forward"]["device"],
    message:
        "Run the probes' rows through {wildcards.layer} at the base rate of {wildcards.base}"
    script:
        "../workflow/scripts/keep_state.py"


rule probe_slots:
    input:
        rows=rules.pick_rows.output.rows,
        state=lambda wildcards: state_before(f"<run>/probes/{base_of(wildcards.wanted)}")(wildcards),
        hidden=rules.finish_probe.output.hidden,
        base=lambda wildcards: ledgers_of_list(
            base_of(wildcards.wanted), LAYERS[number(wildcards.layer) :]
        ),
        draft=lambda wildcards: (
            []
            if wildcards.wanted == base_of(wildcards.wanted)
            else ledgers_of_list(wildcards.wanted, [wildcards.layer])
        ),
        weights=lambda wildcards: expand(
            rules.verify_shard.output.receipt,
            shard=sorted(
                {HEAD_SHARD, NORM_SHARD, EMBED_SHARD}.union(
                    *(LAYER_SHARDS[layer] for layer in LAYERS[number(wildcards.layer) :])
                )
            ),
        ),
    output:
        probes="<run>/probes/{wanted}/{layer}.json",
        record="<run>/provenance/probe_slots/{wanted}.{layer}.json",
    log:
        "<run>/logs/probe_slots/{wanted}.{layer}.log",
    benchmark:
        "<run>/benchmarks/probe_slots/{wanted}.{layer}.tsv"
    conda:
        "../envs/cpu.yaml"
    threads: settings["forward"]["threads"]
    params:
        code=code("probe_slots"),
        source=settings["source"],
        bank=settings["bank_store"],
        layer=lambda wildcards: number(wildcards.layer),
        rate=lambda wildcards: BASES[base_of(wildcards.wanted)]["base_rate"],
        device=settings["forward"]["device"],
    message:
        "Measure what each matrix group of {wildcards.layer} that {wildcards.wanted} encodes loses"
    script:
        "../workflow/scripts/probe_slots.py"


rule draft_plan:
    input:
        ledgers=lambda wildcards: expand(
            rules.encode.output.ledger,
            wanted=base_name(RECIPES[wildcards.recipe]),
            layer=LAYERS,
            block=BLOCKS,
        ),
        statistics=lambda wildcards: statistics_of(RECIPES[wildcards.recipe]),
        probes=lambda wildcards: probes_of(PROBED[wildcards.recipe][:1]),
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
        probes=lambda wildcards: probes_of(PROBED[wildcards.recipe]),
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

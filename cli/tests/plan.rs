//! `gpu-migrate plan` as it is called: on the examples, from stdin, with mistakes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use assert_cmd::Command;
use serde_json::Value;
use std::path::PathBuf;

fn examples() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

fn gpu_migrate(args: &[&str]) -> Command {
    let mut command = Command::cargo_bin("gpu-migrate").unwrap();
    command.args(args).current_dir(examples()).env_remove("GPU_MIGRATE_POLICY").env_remove("CLICOLOR_FORCE");
    command
}

fn run(args: &[&str], stdin: &str) -> (i32, String, String) {
    let output = gpu_migrate(args).write_stdin(stdin).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The promise of the README: two cards are 200 cores and 84 blocks by the default ratio.
#[test]
fn two_cards_become_200_cores_and_84_blocks() {
    let deployment = std::fs::read_to_string(examples().join("deployment.yaml")).unwrap();
    let policy = "\
        {apiVersion: v1, kind: Namespace, metadata: {name: danlu, labels: {gpu-migrate.io/opt-in: 'true', gpu-migrate.io/project: danlu}}}\n\
        ---\n\
        {apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {name: danlu}, spec: {project: danlu, mode: Enforce}}\n";
    let (code, out, err) = run(&["plan", "-f", "-"], &format!("{policy}---\n{deployment}"));
    assert_eq!((code, err.as_str()), (0, ""));
    for line in [
        "-            nvidia.com/gpu: \"2\"",
        "+            tencent.com/vcuda-core: \"200\"",
        "+            tencent.com/vcuda-memory: \"84\"",
    ] {
        assert!(out.lines().any(|l| l == line), "{line:?} is not in\n{out}");
    }
}

/// The other systems' forms, with what is theirs said beside.
#[test]
fn a_policy_may_convert_to_another_systems_form() {
    let pod = "{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: danlu}, spec: {containers: [{name: c, image: i, resources: {limits: {nvidia.com/gpu: 1}}}]}}";
    for (target, cores, lines) in [
        (
            "volcano",
            50,
            vec![
                "+        volcano.sh/vgpu-cores: \"50\"",
                "+        volcano.sh/vgpu-memory: \"10752\"",
                "+  schedulerName: volcano",
            ],
        ),
        ("hami", 50, vec!["         nvidia.com/gpu: 1", "+        nvidia.com/gpumem: \"10752\""]),
        ("kai", 50, vec!["-        nvidia.com/gpu: 1", "+    gpu-memory: \"10752\""]),
        ("hami", 100, vec!["+    gpu-migrate.io/policy: danlu@0"]),
    ] {
        let policy = format!(
            "\
            {{apiVersion: v1, kind: Namespace, metadata: {{name: danlu, labels: {{gpu-migrate.io/opt-in: 'true', gpu-migrate.io/project: danlu}}}}}}\n\
            ---\n\
            {{apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {{name: danlu}}, spec: {{project: danlu, mode: Enforce, convert: {{target: {target}, coresPerCard: {cores}}}}}}}\n"
        );
        let (code, out, err) = run(&["plan", "-f", "-"], &format!("{policy}---\n{pod}"));
        assert_eq!((code, err.as_str()), (0, ""), "{out}");
        for line in lines {
            assert!(
                out.lines().any(|l| l.replace('"', "") == line.replace('"', "")),
                "{target}: {line:?} is not in\n{out}"
            );
        }
        assert!(out.contains("scheduler and plugin serve it"), "{out}");
    }
}

#[test]
fn the_examples_give_this_plan() {
    let (code, out, err) = run(&["plan", "-f", "."], "");
    assert_eq!((code, err.as_str()), (0, ""));
    insta::assert_snapshot!("examples", out);
}

#[test]
fn what_cannot_be_converted_says_why_and_what_to_do() {
    let (code, out, err) =
        run(&["plan", "--policy", "policies.yaml", "-f", "unconvertible", "-o", "summary"], "");
    assert_eq!((code, err.as_str()), (3, ""));
    insta::assert_snapshot!("unconvertible", out);
}

/// What `-o patch` says, done to the objects as written, gives what `-o json` says.
#[test]
fn the_patches_lead_from_the_files_to_the_result() {
    let (_, patches, _) = run(&["plan", "-f", "policies.yaml", "batch.yaml", "list.json", "-o", "patch"], "");
    let (_, result, _) = run(&["plan", "-f", "policies.yaml", "batch.yaml", "list.json", "-o", "json"], "");
    let patches: Vec<Value> = serde_json::from_str(&patches).unwrap();
    let result: Value = serde_json::from_str(&result).unwrap();
    let items = result["items"].as_array().unwrap();
    assert_eq!((patches.len(), items.len()), (4, 4));

    let list = std::fs::read_to_string(examples().join("list.json")).unwrap();
    let list: Value = serde_json::from_str(&list).unwrap();
    for (number, before) in list["items"].as_array().unwrap().iter().enumerate() {
        let mut object = before.clone();
        let patch: json_patch::Patch = serde_json::from_value(patches[number + 2]["patch"].clone()).unwrap();
        json_patch::patch(&mut object, &patch).unwrap();
        assert_eq!(object, items[number + 2]);
    }
}

/// A converted object asks for shares already: applying it again, or after a rollback of the policy, changes nothing.
#[test]
fn the_result_is_left_alone_the_second_time() {
    let (_, yaml, summary) = run(&["plan", "-f", ".", "-o", "yaml"], "");
    assert!(summary.starts_with("7 converted"), "{summary}");
    let (code, out, err) = run(&["plan", "--policy", "policies.yaml", "-f", "-", "-o", "summary"], &yaml);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("0 converted, 7 left alone, 0 cannot"), "{out}");
}

/// With waves, what a workload becomes and when; and what no wave moves.
#[test]
fn a_rollout_in_waves_says_in_which_each_workload_is_moved() {
    let workload = |kind: &str, name: &str, more: &str| {
        format!(
            "{{apiVersion: apps/v1, kind: {kind}, metadata: {{name: {name}, namespace: danlu}}, spec: {{selector: {{matchLabels: {{app: {name}}}}}, {more} template: {{metadata: {{labels: {{app: {name}}}}}, spec: {{containers: [{{name: c, resources: {{limits: {{nvidia.com/gpu: 1}}}}}}]}}}}}}}}\n"
        )
    };
    let policy = "{apiVersion: v1, kind: Namespace, metadata: {name: danlu, labels: {gpu-migrate.io/opt-in: 'true', gpu-migrate.io/project: danlu}}}\n---\n\
        {apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {name: danlu}, spec: {project: danlu, mode: Enforce, rollout: {waves: [{workloads: [Deployment/danlu/canary]}, {workloads: [StatefulSet/danlu/store]}]}}}\n";
    let stream = [
        policy.to_owned(),
        workload("Deployment", "canary", ""),
        workload("StatefulSet", "store", "serviceName: store,"),
        workload("Deployment", "forgotten", ""),
        workload("DaemonSet", "byhand", "updateStrategy: {type: OnDelete},"),
        "{apiVersion: v1, kind: Pod, metadata: {name: bare, namespace: danlu}, spec: {containers: [{name: c, resources: {limits: {nvidia.com/gpu: 1}}}]}}\n".to_owned(),
    ]
    .join("---\n");
    let (code, out, err) = run(&["plan", "-f", "-", "-o", "summary"], &stream);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let line = |name: &str| out.lines().find(|line| line.contains(name)).unwrap_or_default();
    assert!(out.starts_with("2 converted, 3 left alone"), "{out}");
    assert!(
        line("danlu/canary").contains("1 whole card → 100 cores and 42 blocks (10.5 GiB), in wave 1 of 2"),
        "{out}"
    );
    assert!(line("danlu/store").contains("in wave 2 of 2"), "{out}");
    assert!(line("danlu/forgotten").contains("in no wave of its policy"), "{out}");
    assert!(line("danlu/byhand").contains("OnDelete"), "{out}");
    assert!(line("danlu/bare").contains("does not restart bare pods"), "{out}");
    let (_, diff, _) = run(&["plan", "-f", "-"], &stream);
    assert!(
        diff.contains("+        gpu-migrate.io/convert: \"true\""),
        "the operator's part of the change: {diff}"
    );
}

#[test]
fn colour_only_where_it_was_asked_for() {
    let file = ["plan", "-f", "policies.yaml", "deployment.yaml"];
    let (_, piped, _) = run(&file, "");
    assert!(!piped.contains('\u{1b}'));
    let (_, forced, _) = run(&[&["--color", "always"], &file[..]].concat(), "");
    assert!(forced.contains("\u{1b}[32m+"), "{forced}");
    let output = gpu_migrate(&file).env("CLICOLOR_FORCE", "1").env("NO_COLOR", "1").output().unwrap();
    let forced_off = gpu_migrate(&[&["--color", "never"], &file[..]].concat())
        .env("CLICOLOR_FORCE", "1")
        .output()
        .unwrap();
    assert!(!String::from_utf8(forced_off.stdout).unwrap().contains('\u{1b}'));
    drop(output);
}

#[test]
fn errors_name_file_document_and_field_and_hide_nothing() {
    let good = std::fs::read_to_string(examples().join("deployment.yaml")).unwrap();
    let cases = [
        (
            "{apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {name: x}, spec: {project: p, mode: Off}}\n",
            "GPUMigration x: spec.mode: Off without quotes is the boolean false; write \"Off\"",
        ),
        ("kind: [\n", "stdin: document 1 cannot be read: "),
        ("a: 1\n", "stdin:1 (document 1): kind: is missing; expected the kind"),
        (
            "{apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {name: x}, spec: {project: p, convret: {}}}\n",
            "stdin:1 (document 1): GPUMigration x: unknown field: spec.convret",
        ),
        (
            "{apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {name: x}, spec: {project: p, mode: Sometimes}}\n",
            "GPUMigration x: spec.mode: unknown variant `Sometimes`, expected one of",
        ),
        (
            "{apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {name: x}, spec: {project: p, convert: {coresPerCard: 150}}}\n",
            "GPUMigration x: ",
        ),
        (
            "{apiVersion: v1, kind: Namespace, metadata: {name: x, labels: {a: true}}}\n",
            "metadata.labels: invalid type: boolean `true`",
        ),
    ];
    for (text, part) in cases {
        let args = ["plan", "-f", "-", "deployment.yaml", "--policy", "policies.yaml", "-o", "summary"];
        let (code, out, err) = run(&args, text);
        assert_eq!(code, 1, "{text}: {err}");
        assert!(err.contains(part), "{text}: {err}");
        assert!(out.starts_with("1 converted"), "the good file is still planned: {out}");
    }
    let (code, _, err) = run(&["plan", "-f", "nowhere.yaml"], &good);
    assert_eq!(code, 1);
    assert!(err.contains("nowhere.yaml: cannot be read: No such file"), "{err}");
    let (code, _, err) = run(&["plan", "--kubeconfig", "nowhere"], "");
    assert_eq!(code, 1);
    assert!(err.contains("without -f the plan is of a cluster: kubeconfig nowhere"), "{err}");
    let (code, _, err) = run(&["plan", "-f", "deployment.yaml", "--context", "x"], "");
    assert_eq!(code, 2);
    assert!(err.contains("cannot be used with '--context"), "{err}");
}

#[test]
fn without_a_policy_it_says_what_is_missing() {
    let (code, out, err) = run(&["plan", "-f", "deployment.yaml", "-o", "summary"], "");
    assert_eq!(code, 0);
    assert!(out.contains("Namespace danlu is not among the files: add it with its labels"), "{out}");
    assert!(err.contains("warning: no policy (GPUMigration) among the files"), "{err}");
}

/// Whatever stands where in a manifest: an answer or an error, never a panic.
#[test]
fn no_shape_of_a_manifest_makes_it_panic() {
    let shapes = ["null", "1", "-1", "\"x\"", "[]", "{}", "[null]", "[1]", "{a: b}", "true", "1e400"];
    let places = [
        "{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: danlu}, spec: @}",
        "{apiVersion: v1, kind: Pod, metadata: @, spec: {containers: []}}",
        "{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: danlu, labels: @}, spec: {containers: [{name: c}]}}",
        "{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: danlu}, spec: {containers: @}}",
        "{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: danlu}, spec: {containers: [{name: c, resources: @}]}}",
        "{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: danlu}, spec: {containers: [{name: c, resources: {limits: {nvidia.com/gpu: @}}}]}}",
        "{apiVersion: v1, kind: Pod, metadata: {name: p, namespace: danlu}, spec: {nodeSelector: @, tolerations: @, containers: [{name: c, resources: {limits: {nvidia.com/gpu: 1}}}]}}",
        "{apiVersion: apps/v1, kind: Deployment, metadata: {name: d, namespace: danlu}, spec: {template: @}}",
        "{apiVersion: apps/v1, kind: Deployment, metadata: {name: d, namespace: danlu}, spec: @}",
        "{apiVersion: v1, kind: List, items: @}",
        "{apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {name: x}, spec: @}",
        "{apiVersion: v1, kind: Namespace, metadata: @}",
        "@",
    ];
    let stream = places
        .iter()
        .flat_map(|place| shapes.iter().map(|shape| place.replace('@', shape)))
        .collect::<Vec<_>>()
        .join("\n---\n");
    for output in ["diff", "patch", "yaml", "json"] {
        let (code, _, err) = run(&["plan", "--policy", "policies.yaml", "-f", "-", "-o", output], &stream);
        assert_eq!(code, 1, "{err}");
        assert!(!err.contains("panicked"), "{err}");
    }
}

const POLICY: &str = "\
    {apiVersion: v1, kind: Namespace, metadata: {name: default, labels: {gpu-migrate.io/opt-in: 'true', gpu-migrate.io/project: p}}}\n\
    ---\n\
    {apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {name: p}, spec: {project: p, mode: Enforce, convert: {coresPerCard: 50, blocksPerCard: 21}}}\n";

#[test]
fn an_object_of_any_kind_that_makes_pods_with_cards_is_named() {
    let template = "{spec: {containers: [{name: c, image: i, resources: {limits: {nvidia.com/gpu: 1}}}]}}";
    let objects = [
        (
            "ray.io/v1",
            "RayCluster",
            format!(
                "{{headGroupSpec: {{template: {template}}}, workerGroupSpecs: [{{template: {template}}}]}}"
            ),
        ),
        (
            "kubeflow.org/v1",
            "PyTorchJob",
            format!("{{pytorchReplicaSpecs: {{Worker: {{template: {template}}}}}}}"),
        ),
        (
            "argoproj.io/v1alpha1",
            "Workflow",
            "{templates: [{name: t, container: {image: i, resources: {limits: {nvidia.com/gpu: 1}}}}]}"
                .to_owned(),
        ),
        ("argoproj.io/v1alpha1", "Rollout", format!("{{template: {template}}}")),
        (
            "leaderworkerset.x-k8s.io/v1",
            "LeaderWorkerSet",
            format!("{{leaderWorkerTemplate: {{workerTemplate: {template}}}}}"),
        ),
        (
            "serving.kserve.io/v1beta1",
            "InferenceService",
            "{predictor: {model: {resources: {requests: {nvidia.com/gpu: '1'}}}}}".to_owned(),
        ),
        ("batch.volcano.sh/v1alpha1", "Job", format!("{{tasks: [{{name: t, template: {template}}}]}}")),
        (
            "jobset.x-k8s.io/v1alpha2",
            "JobSet",
            format!("{{replicatedJobs: [{{template: {{spec: {{template: {template}}}}}}}]}}"),
        ),
        ("v1", "Service", "{ports: []}".to_owned()),
        ("v1", "ResourceQuota", "{hard: {requests.nvidia.com/gpu: 4}}".to_owned()),
    ];
    let text = objects.iter().map(|(api, kind, spec)| {
        format!("---\n{{apiVersion: {api}, kind: {kind}, metadata: {{name: x}}, spec: {spec}}}\n")
    });
    let (code, out, err) =
        run(&["plan", "-o", "summary", "-f", "-"], &(POLICY.to_owned() + &text.collect::<String>()));
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.starts_with("0 converted, 0 left alone, 0 cannot be converted, 8 of other controllers\n(2 other objects make no pods)"), "{out}");
    for line in [
        "RayCluster x        spec.headGroupSpec.template: 1 whole card → 50 cores and 21 blocks (5.25 GiB); spec.workerGroupSpecs[0].template: 1 whole card",
        "Workflow x          spec.templates[0].container: requests nvidia.com/gpu; how its pods look is known when they are created",
        "JobSet x            spec.replicatedJobs[0].template.spec.template: 1 whole card → 50 cores",
    ] {
        assert!(out.contains(line), "{line} is not in\n{out}");
    }
}

#[test]
fn a_policy_that_is_reached_twice_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let pod = "---\n{apiVersion: v1, kind: Pod, metadata: {name: x}, spec: {containers: [{name: c, image: i, resources: {limits: {nvidia.com/gpu: 2}}}]}}\n";
    let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
    write("a.yaml", &(POLICY.to_owned() + pod));
    write("b.yaml", POLICY);
    let path = folder.path().to_str().unwrap();
    let (code, out, err) = run(&["plan", "-o", "summary", "-f", path], "");
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("2 whole cards → 200 cores and 84 blocks (21 GiB) (containers of several cards keep whole ones: multiCard)"), "{out}");
    write("b.yaml", &POLICY.replace("blocksPerCard: 21", "blocksPerCard: 22"));
    let (code, _, err) = run(&["plan", "-o", "summary", "-f", path], "");
    assert_eq!(code, 1);
    assert!(
        err.contains("GPUMigration p is given twice with different specs: ") && err.contains("b.yaml:3"),
        "{err}"
    );
}

#[test]
fn a_policy_of_another_version_is_an_error() {
    let text = POLICY.replace("gpu-migrate.io/v1alpha1", "gpu-migrate.io/v1beta1");
    let (code, _, err) = run(&["plan", "-o", "summary", "-f", "-"], &text);
    assert_eq!(code, 1);
    let expected = "GPUMigration p: apiVersion is gpu-migrate.io/v1beta1; expected gpu-migrate.io/v1alpha1";
    assert!(err.contains(expected), "{err}");
}

#[test]
fn a_foreign_kind_is_in_the_waves_once_the_config_names_it() {
    let waved = POLICY.replace(
        "convert:",
        "rollout: {waves: [{workloads: [Rollout/default/x]}, {percent: 100}]}, convert:",
    );
    let object = |kind: &str, api: &str| {
        format!(
            "---\n{{apiVersion: {api}, kind: {kind}, metadata: {{name: x}}, spec: {{selector: {{}}, template: {{spec: {{containers: [{{name: c, image: i, resources: {{limits: {{nvidia.com/gpu: 1}}}}}}]}}}}}}}}\n"
        )
    };
    let config = "---\n{apiVersion: gpu-migrate.io/v1alpha1, kind: GPUConfig, metadata: {name: cluster}, spec: {workloadKinds: [{name: Rollout.argoproj.io}]}}\n";
    let rollout = object("Rollout", "argoproj.io/v1alpha1");
    let (_, out, err) = run(&["plan", "-o", "summary", "-f", "-"], &format!("{waved}{rollout}"));
    assert!(out.contains("or name Rollout.argoproj.io in spec.workloadKinds of the GPUConfig"), "{out}{err}");
    let (_, out, err) = run(&["plan", "-o", "summary", "-f", "-"], &format!("{waved}{rollout}{config}"));
    assert!(out.contains("1 whole card; converted in wave 1 of 2"), "{out}{err}");
    let ray = object("RayCluster", "ray.io/v1");
    let (_, out, err) = run(&["plan", "-o", "summary", "-f", "-"], &format!("{waved}{ray}{config}"));
    assert!(out.contains("KubeRay does not replace running pods"), "{out}{err}");
}

#[test]
fn requests_of_other_systems_are_named_with_what_is_lost() {
    let pod = |name: &str, annotations: &str, limits: &str| {
        format!(
            "---\n{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, annotations: {{{annotations}}}}}, spec: {{containers: [{{name: c, image: i, resources: {{limits: {{{limits}}}}}}}]}}}}\n"
        )
    };
    let text = [
        POLICY.to_owned(),
        pod("volcano", "", "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1024"),
        pod("kai", "gpu-fraction: '0.5'", "cpu: 1"),
        pod("both", "gpu-fraction: '0.5'", "nvidia.com/gpu: 1"),
    ];
    let (_, out, err) = run(&["plan", "-o", "summary", "-f", "-"], &text.concat());
    for part in [
        "it requests no card; it requests shares of Volcano (volcano.sh/vgpu-memory, volcano.sh/vgpu-number)",
        "it requests no card; it requests shares of KAI (gpu-fraction)",
        "1 whole card → 50 cores and 21 blocks (5.25 GiB); it requests shares of KAI (gpu-fraction)",
    ] {
        assert!(out.contains(part), "{part} is not in\n{out}{err}");
    }
}

/// By hand: vision has three pods of a card, which become halves, a Job of 4 × 2 cards, which keeps whole ones, a pod that cannot be converted
/// (1 card) and one with a share of KAI besides (1 card → half); search has waves, a workload of two cards in one and a bare pod in none. The
/// pods of the DaemonSet are as many as there are nodes. What requests no card is not in it.
#[test]
fn the_summary_ends_with_each_projects_cards_before_and_after() {
    let namespace = |name: &str| {
        format!(
            "---\n{{apiVersion: v1, kind: Namespace, metadata: {{name: {name}, labels: {{gpu-migrate.io/opt-in: 'true', gpu-migrate.io/project: {name}}}}}}}\n"
        )
    };
    let policy = |name: &str, rollout: &str| {
        format!(
            "---\n{{apiVersion: gpu-migrate.io/v1alpha1, kind: GPUMigration, metadata: {{name: {name}}}, spec: {{project: {name}, mode: Enforce, {rollout} convert: {{coresPerCard: 50, blocksPerCard: 21}}}}}}\n"
        )
    };
    let spec = |limits: &str| {
        format!("spec: {{containers: [{{name: c, image: i, resources: {{limits: {{{limits}}}}}}}]}}")
    };
    let pod = |namespace: &str, name: &str, annotations: &str, limits: &str| {
        format!(
            "---\n{{apiVersion: v1, kind: Pod, metadata: {{name: {name}, namespace: {namespace}, annotations: {{{annotations}}}}}, {}}}\n",
            spec(limits)
        )
    };
    let workload = |kind: &str, namespace: &str, name: &str, amount: &str, limits: &str| {
        let api = if kind == "Job" { "batch/v1" } else { "apps/v1" };
        format!(
            "---\n{{apiVersion: {api}, kind: {kind}, metadata: {{name: {name}, namespace: {namespace}}}, spec: {{{amount} selector: {{}}, template: {{{}}}}}}}\n",
            spec(limits)
        )
    };
    let text = [
        namespace("vision"),
        namespace("search"),
        policy("vision", ""),
        policy("search", "rollout: {waves: [{percent: 100}]},"),
        workload("Deployment", "vision", "web", "replicas: 3,", "nvidia.com/gpu: 1"),
        workload("Job", "vision", "train", "parallelism: 4,", "nvidia.com/gpu: 2"),
        workload("DaemonSet", "vision", "probe", "", "nvidia.com/gpu: 1"),
        workload("Deployment", "vision", "plain", "replicas: 9,", "cpu: 1"),
        pod("vision", "hami", "", "nvidia.com/gpu: 1, nvidia.com/gpumem: 1000"),
        pod("vision", "kai", "gpu-fraction: '0.5'", "nvidia.com/gpu: 1"),
        workload("Deployment", "search", "index", "", "nvidia.com/gpu: 2"),
        pod("search", "bare", "", "nvidia.com/gpu: 1"),
        pod("elsewhere", "other", "", "nvidia.com/gpu: 1"),
    ];
    let (code, out, err) = run(&["plan", "-o", "summary", "-f", "-"], &text.concat());
    assert_eq!((code, err.as_str()), (3, ""), "{out}");
    let at = out.find("PROJECT ").unwrap();
    insta::assert_snapshot!(&out[at..], @"
    PROJECT  PODS  CARDS  AFTER  NO WAVE  UNCONVERTIBLE  AMBIGUOUS
    search   2     3      3      1        0              0
    vision   9     13     11     0        1              2
    (none)   1     1      1      0        0              0
    search: no wave reaches Pod search/bare
    vision: cannot be converted: Pod vision/hami
    vision: ambiguous, with shares of another system: Pod vision/hami (HAMi), Pod vision/kai (KAI)
    vision: not counted, because the number of pods is not in the object: DaemonSet vision/probe
    ");
    let (_, bare, _) = run(&["plan", "-o", "summary", "--no-headers", "-f", "-"], &text.concat());
    assert!(!bare.contains("PROJECT ") && bare.contains("\nsearch  2  3 "), "{bare}");
    let (_, json, summary) = run(&["plan", "-o", "json", "-f", "-"], &text.concat());
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        json["projects"][1],
        serde_json::json!({"project": "vision", "objects": 5, "pods": 9, "cardsBefore": 13.0, "cardsAfter": 11.0, "inNoWave": [],
            "unconvertible": ["Pod vision/hami"], "otherSystems": ["Pod vision/hami (HAMi)", "Pod vision/kai (KAI)"],
            "uncounted": ["DaemonSet vision/probe"]})
    );
    assert_eq!(json["projects"][2]["project"], Value::Null);
    assert!(summary.contains("PROJECT "), "{summary}");
    let (_, names, _) = run(&["plan", "-o", "name", "-f", "-"], &text.concat());
    assert!(
        names.starts_with("deployment.apps/web\njob.batch/train\ndaemonset.apps/probe\npod/kai\n"),
        "{names}"
    );
}

#[allow(dead_code)] // its `main` writes to stdout
#[path = "../../replay/examples/dump.rs"]
mod made;

/// A dump of nodes and pods, without what made the pods: the pods of a workload are one line, in YAML as in JSON.
#[test]
fn the_pods_of_a_dump_are_planned_by_workload() {
    let mut dump = Vec::new();
    made::write(40, 400, &mut dump).unwrap();
    let dump = String::from_utf8(dump).unwrap();
    let (code, out, err) = run(&["plan", "-f", "-", "-o", "summary"], &dump);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(
        out.starts_with(
            "250 converted, 150 left alone, 0 cannot be converted\n(40 other objects make no pods)\n"
        ),
        "{out}"
    );
    let lines = out.lines().filter(|line| line.starts_with("  Pod team-00/app-")).collect::<Vec<_>>();
    assert_eq!(lines.len(), 16, "{out}");
    assert!(lines.iter().all(|line| line.contains(" and 24 more ")), "{out}");
    assert!(lines[0].contains("1 whole card → 50 cores and 80 blocks (20 GiB)"), "{out}");
    let value: Value = serde_json::from_str(&dump).unwrap();
    let places = |text: String| {
        text.lines().map(|line| line.split("  -:").next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (_, yaml, _) = run(&["plan", "-f", "-", "-o", "summary"], &serde_saphyr::to_string(&value).unwrap());
    assert_eq!(places(yaml), places(out));
}

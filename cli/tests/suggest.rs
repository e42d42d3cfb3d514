//! `suggest`: from a recording or a Prometheus to policies, and from those to freed cards.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests, too, may fail loudly

use assert_cmd::Command;
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::routing::get;
use axum::{Json, Router};
use gpu_migrate_webhook::policy_file::PolicyFile;
use jiff::{Timestamp, ToSpan as _};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const GIB: u64 = 1 << 30;

fn run(args: &[&str]) -> (i32, String, String) {
    let output = Command::cargo_bin("gpu-migrate").unwrap().args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// One line of a recording: so many minutes after the first one, a pod with a whole card of 48 GiB.
fn line(minute: i64, namespace: &str, pod: u64, percent: u64, memory: u64) -> String {
    let begin: Timestamp = "2026-11-16T08:00:00Z".parse().unwrap();
    let sample = json!({"time": begin + minute.minutes(), "node": "gpu-01", "card": format!("GPU-{pod}"), "model": "NVIDIA L40S",
        "cardMemoryBytes": 48 * GIB, "namespace": namespace, "pod": format!("web-{pod}"), "container": "main", "kind": "legacy", "processes": 1,
        "utilizationPercent": percent, "memoryUsedBytes": memory, "coresRequested": 100, "memoryRequestedBytes": 48 * GIB});
    sample.to_string() + "\n"
}

/// A week, each hour, of four pods that use from 0 to 19 percent and up to 2 GiB of a card each.
fn week(namespace: &str) -> String {
    let of_pod = |pod: u64| {
        (0..=168).map(move |hour: u64| {
            let memory = if hour == 100 { 2 * GIB } else { GIB };
            line(hour as i64 * 60, namespace, pod, (hour + pod) % 20, memory)
        })
    };
    (0..4).flat_map(of_pod).collect()
}

fn policies() -> Value {
    json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "danlu",
            "labels": {"gpu-migrate.io/opt-in": "true", "gpu-migrate.io/project": "danlu", "team": "x"}}},
        {"apiVersion": "gpu-migrate.io/v1alpha1", "kind": "GPUMigration", "metadata": {"name": "danlu"},
            "spec": {"project": "danlu", "mode": "Enforce", "convert": {"coresPerCard": 50, "blocksPerCard": 42}, "rollout": {"maxUnavailable": 2}}},
    ]})
}

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

#[test]
fn what_was_seen_and_what_would_change_is_shown() {
    let files = Files::new();
    let recording = files.write("use.jsonl", &week("danlu"));
    let from = files.write("policies.json", &policies().to_string());
    let (code, out, err) = run(&["suggest", "--recording", &recording, "--from", &from]);
    assert_eq!((code, err.as_str()), (0, ""));
    // Of each pod every percentage from 0 to 19 was seen 8 or 9 times of 169. The p95 is at rank 159.6 from 0, and 18 has ranks 153 to 160;
    // the median is at rank 84, which is 9. 18 + 20 % = 21.6, so 25 cores; 2 GiB + 20 % = 9.6 blocks.
    insta::assert_snapshot!(out, @r"
    PROJECT  CONTAINER  PODS  SAMPLES  OVER  P50  P95  PEAK     AT LIMIT  NOW                 PROPOSED
    danlu    main       4     676      7 d   9%   18%  2.0 GiB  –         50 cores, 10.5 GiB  25 cores, 2.5 GiB

    P50, P95: percent of a card kept busy, of the pod that uses most. PEAK: most memory of a card. AT LIMIT: part of the time in which a share
    kept nearly all of its cores busy. Peaks between two samples are not seen; the margins are for them.

    --- GPUMigration danlu
    +++ GPUMigration danlu (proposed)
    @@ -7,6 +7,10 @@
         blocksPerCard: 42
         coresPerCard: 50
         multiCard: Whole
    +    overrides:
    +    - blocksPerCard: 10
    +      container: main
    +      coresPerCard: 25
       mode: Enforce
       project: danlu
       rollout:
    ");
}

/// The whole way: what was seen, the policy, how many cards that frees.
#[test]
fn simulate_says_how_many_cards_the_proposed_policy_frees() {
    let files = Files::new();
    let recording = files.write("use.jsonl", &week("danlu"));
    let from = files.write("policies.json", &policies().to_string());
    let (code, yaml, err) = run(&["suggest", "--recording", &recording, "--from", &from, "-o", "yaml"]);
    assert_eq!((code, err.as_str()), (0, ""));
    let file = PolicyFile::parse(&yaml).unwrap();
    let spec = &file.migrations[0].spec;
    assert_eq!(
        json!(spec.convert.overrides),
        json!([{"container": "main", "coresPerCard": 25, "blocksPerCard": 10}])
    );
    assert_eq!(
        (spec.convert.cores_per_card.0, spec.rollout.max_unavailable),
        (50, 2),
        "the rest is as it was"
    );
    let labels = json!({"gpu-migrate.io/opt-in": "true", "gpu-migrate.io/project": "danlu"});
    assert_eq!(json!(file.namespaces), json!({"danlu": labels}), "our labels alone");

    let proposed = files.write("proposed.yaml", &yaml);
    let pod = |number: u32| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": format!("web-{number}"), "namespace": "danlu"}, "status": {"phase": "Running"},
            "spec": {"nodeName": "gpu-01", "containers": [{"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}})
    };
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "gpu-01", "labels": {"nvidia.com/gpu.memory": "49152"}},
        "status": {"capacity": {"nvidia.com/gpu": "4", "cpu": "64", "memory": "256Gi"}}});
    let items: Vec<Value> = std::iter::once(node).chain((0..4).map(pod)).collect();
    let snapshot =
        files.write("cluster.json", &json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string());
    let simulate = ["simulate", "--snapshot", &snapshot, "--policy-file", &proposed, "-o", "json"];
    let (code, out, err) = run(&simulate);
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let plans: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(plans["plans"][0]["cardsFreed"], 3, "four quarters are one card: {out}");
    let template = json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "main", "image": "i", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}});
    let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web", "namespace": "danlu"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": template}});
    let deployment = files.write("deployment.json", &deployment.to_string());
    let (code, out, err) = run(&["plan", "--policy", &proposed, "-f", &deployment, "-o", "summary"]);
    assert!(code == 0 && out.contains("25 cores and 10 blocks"), "{out}{err}");
}

#[test]
fn too_little_is_no_answer_until_it_is_asked_for() {
    let files = Files::new();
    let recording = files.write("use.jsonl", &line(0, "danlu", 0, 30, 6 * GIB));
    let from = files.write("policies.json", &policies().to_string());
    let arguments = ["suggest", "--recording", &recording, "--from", &from, "-o", "table"];
    let (code, out, err) = run(&arguments);
    assert_eq!((code, err.as_str()), (3, ""));
    let why = "danlu main: 1 sample over 0 min is too little: expected at least 100 over 1 d (--min-samples, --min-span)";
    assert!(out.contains(why) && out.contains(" ?\n"), "{out}");
    let (code, out, _) = run(&[&arguments[..], &["--min-samples", "1", "--min-span", "0h"]].concat());
    assert!(code == 0 && out.contains("40 cores, 7.25 GiB"), "{out}");
    let (code, out, _) = run(&[
        &arguments[..],
        &["--min-samples", "1", "--min-span", "0h", "--cores-margin", "0", "--memory-margin", "50"],
    ]
    .concat());
    assert!(code == 0 && out.contains("30 cores, 9 GiB"), "{out}");
}

#[test]
fn nothing_recorded_is_an_error_and_a_broken_line_is_said() {
    let files = Files::new();
    let from = files.write("policies.json", &policies().to_string());
    let empty = files.write("empty.jsonl", "");
    let (code, out, err) = run(&["suggest", "--recording", &empty, "--from", &from]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("empty.jsonl: no sample of a container with a card; expected lines that"), "{err}");
    let recording = files.write("use.jsonl", &week("danlu"));
    let (code, _, err) = run(&["suggest", "--recording", &recording, "--from", &from, "-n", "other"]);
    assert!(code == 1 && err.contains("no sample of a container with a card of namespace other"), "{err}");
    let absent = files.path("absent.jsonl");
    let (code, _, err) = run(&["suggest", "--recording", absent.to_str().unwrap(), "--from", &from]);
    assert!(code == 1 && err.contains("absent.jsonl: No such file"), "{err}");
    let week = week("danlu");
    let torn = files.write("torn.jsonl", &week[..week.len() - 30]);
    let (code, out, err) =
        run(&["suggest", "--recording", &torn, &recording, "--from", &from, "-o", "table"]);
    assert!(code == 0 && out.contains("1351"), "{out}");
    assert!(
        err.starts_with("warning: recording ")
            && err.contains("torn.jsonl: 1 line skipped, the first is line 676: "),
        "{err}"
    );
}

#[test]
fn a_project_without_a_policy_gets_one_and_whoever_has_no_project_is_named() {
    let files = Files::new();
    let recording = files.write("use.jsonl", &(week("danlu") + &week("plain")));
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "danlu", "labels": {"gpu-migrate.io/project": "danlu"}}});
    let from = files.write("namespaces.json", &namespace.to_string());
    let (code, out, err) = run(&["suggest", "--recording", &recording, "--from", &from]);
    assert_eq!(code, 0, "{err}");
    assert!(
        out.contains("\n--- no policy\n+++ GPUMigration danlu (proposed)\n+apiVersion: ")
            && out.contains("+  mode: Audit"),
        "{out}"
    );
    assert!(out.contains("left out: 4 pods in no project (label gpu-migrate.io/project on the pod or its namespace): plain/web-0, plain/web-1, plain/web-2 and 1 more"), "{out}");
    assert!(
        err.contains("Namespace danlu has no label gpu-migrate.io/opt-in: \"true\", without which"),
        "{err}"
    );
}

type Asked = Arc<Mutex<Vec<String>>>;

/// Answers as Prometheus does, by what the query begins with.
async fn answer(
    State(asked): State<Asked>,
    headers: HeaderMap,
    Query(parameters): Query<HashMap<String, String>>,
) -> Json<Value> {
    assert!(!headers.contains_key("authorization"), "no token over plain http");
    let query = parameters["query"].clone();
    asked.lock().unwrap().push(query.clone());
    let container = json!({"namespace": "danlu", "pod": "web-0", "container": "main", "UUID": "GPU-0", "gpu": "0", "kind": "legacy",
        "instance": "10.0.0.1:9404", "node": "gpu-01"});
    let (labels, value) = match query.split(['(', '[']).collect::<Vec<_>>().as_slice() {
        ["count_over_time", ..] => (container, "40000"),
        ["min_over_time", "timestamp", ..] => (container, "1800000000"),
        ["max_over_time", "timestamp", ..] => (container, "1800604800"),
        ["quantile_over_time", rest, ..] if rest.starts_with("0.5,") => (container, "0.12"),
        ["quantile_over_time", rest, ..] if rest.starts_with("0.95,") => (container, "0.3"),
        ["max_over_time", "count by ", ..] => {
            (json!({"namespace": "danlu", "pod": "web-0", "container": "main"}), "1")
        }
        ["max_over_time", ..] => (container, "6442450944"),
        ["last_over_time", rest, ..] if rest.contains("container_requested_ratio") => (container, "1"),
        ["last_over_time", rest, ..] if rest.contains("card_memory_bytes") => {
            (json!({"UUID": "GPU-0", "modelName": "NVIDIA L40S"}), "51539607552")
        }
        // No share.
        ["avg_over_time", ..] => {
            return Json(json!({"status": "success", "data": {"resultType": "vector", "result": []}}));
        }
        other => panic!("{other:?}"),
    };
    let none = query.contains("namespace=\"empty\"");
    let series =
        if none { json!([]) } else { json!([{"metric": labels, "value": [1_800_604_800.123, value]}]) };
    Json(json!({"status": "success", "data": {"resultType": "vector", "result": series}}))
}

async fn suggest(arguments: Vec<String>) -> (i32, String, String) {
    let run = move || run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}

fn line_of(url: &str, from: &str, more: &[&str]) -> Vec<String> {
    let first = ["suggest", "--prometheus", url, "--from", from];
    first.iter().chain(more).map(|&word| word.to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_is_asked_for_the_window_and_the_namespace() {
    let asked = Asked::default();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().route("/api/v1/query", get(answer)).with_state(Arc::clone(&asked));
    let server = tokio::spawn(async move { axum::serve(listener, router).await });
    let files = Files::new();
    let from = files.write("policies.json", &policies().to_string());
    let token = files.write("token", "secret");

    let (code, out, err) = suggest(line_of(
        &url,
        &from,
        &["-n", "danlu", "--window", "14d", "--token-file", &token, "-o", "json"],
    ))
    .await;
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    let value: Value = serde_json::from_str(&out).unwrap();
    // 30 + 20 % = 36; 6 GiB + 20 % = 28.8 blocks.
    let expected = json!({"project": "danlu", "policy": "danlu", "container": "main", "namespaces": ["danlu"],
        "evidence": {"pods": 1, "samples": 40000, "from": "2027-01-15T08:00:00Z", "to": "2027-01-22T08:00:00Z", "p50": 12.0, "p95": 30.0,
            "peakBytes": 6 * GIB, "models": ["NVIDIA L40S"], "cardBytes": 48 * GIB},
        "now": {"cores": 50, "blocks": 42}, "proposed": {"cores": 40, "blocks": 29}});
    assert_eq!(value["containers"], json!([expected]));
    assert_eq!(value["policies"][0]["spec"]["convert"]["overrides"][0]["coresPerCard"], 40);
    let queries = std::mem::take(&mut *asked.lock().unwrap());
    assert_eq!(queries.len(), 10, "{queries:#?}");
    assert!(queries.iter().all(|query| query.contains("[14d")), "{queries:#?}");
    let exported = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../plugin-bridge/src/usage/export.rs"),
    )
    .unwrap();
    for name in queries.iter().flat_map(|query| query.split("gpu_migrate_node_agent_").skip(1)) {
        let name = name.split(['{', '[']).next().unwrap();
        assert!(exported.contains(&format!("\"{name}\"")), "no node agent exports {name}");
    }
    let of_containers = queries.iter().filter(|query| query.contains("container_"));
    assert!(
        of_containers.clone().count() == 9
            && of_containers.clone().all(|query| query.contains("namespace=\"danlu\""))
    );

    let (code, out, err) = suggest(line_of(&url, &from, &["-n", "empty"])).await;
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(
        err.contains(
            "no series gpu_migrate_node_agent_container_memory_used_bytes of namespace empty in the last 7d"
        ),
        "{err}"
    );

    server.abort();
    let _ = server.await;
    let (code, _, err) = suggest(line_of(&url, &from, &[])).await;
    assert!(code == 1 && err.starts_with(&format!("error: {url}: ")), "{err}");
}

#[test]
fn one_source_is_needed_and_windows_are_checked() {
    for (arguments, expected) in [
        (vec![], "--recording"),
        (vec!["--recording", "a", "--prometheus", "http://p"], "cannot be used with"),
        (vec!["--recording", "a", "--window", "1d"], "cannot be used with"),
        (vec!["--recording", "a", "--token-file", "t"], "cannot be used with"),
        (vec!["--prometheus", "http://p", "--window", "7"], "expected a number and m, h, d or w"),
        (vec!["--recording", "a", "--min-span", "x"], "expected a number and m, h, d or w"),
    ] {
        let (code, _, err) = run(&[&["suggest"], &arguments[..]].concat());
        assert!(code == 2 && err.contains(expected), "{arguments:?}: {err}");
    }
}

/// A cluster with one node agent, which can be asked; while `down` is set, the API server fails.
fn cluster(down: Arc<AtomicBool>) -> Router {
    let items = |kind: &str, version: &str, items: Value| json!({"apiVersion": version, "kind": format!("{kind}List"), "metadata": {}, "items": items});
    let policies = policies();
    let agent = json!({"metadata": {"name": "agent-x", "namespace": "gpus", "labels": {
            "app.kubernetes.io/name": "gpu-migrate", "app.kubernetes.io/component": "bridge"}}, "status": {"phase": "Running"},
        "spec": {"nodeName": "gpu-01", "containers": [{"name": "bridge", "ports": [{"name": "metrics", "containerPort": 9404}]}]}});
    let pod = json!({"metadata": {"name": "web-0", "namespace": "danlu"}, "spec": {"nodeName": "gpu-01", "containers": [{"name": "main"}]}});
    let container = json!({"namespace": "danlu", "pod": "web-0", "container": "main", "kind": "legacy", "processes": 1, "utilizationPercent": 30,
        "memoryUsedBytes": 6 * GIB, "coresRequested": 100, "memoryRequestedBytes": 48 * GIB});
    // A process that is in no pod.
    let other = json!({"namespace": "", "pod": "", "container": "", "kind": "none", "processes": 1, "utilizationPercent": 1, "memoryUsedBytes": GIB});
    let cards = json!([{"index": 0, "uuid": "GPU-0", "model": "NVIDIA L40S", "memoryBytes": 48 * GIB, "containers": [container, other]}]);
    let own = "gpu-migrate.io/v1alpha1";
    let answers = [
        ("/api/v1/pods", items("Pod", "v1", json!([agent, pod]))),
        ("/api/v1/namespaces", items("Namespace", "v1", json!([policies["items"][0]]))),
        ("/apis/gpu-migrate.io/v1alpha1/gpushadows", items("GPUShadow", own, json!([]))),
        (
            "/apis/gpu-migrate.io/v1alpha1/gpumigrations",
            items("GPUMigration", own, json!([policies["items"][1]])),
        ),
        ("/api/v1/namespaces/gpus/pods/agent-x:9404/proxy/use", json!({"cards": cards})),
    ];
    let mut router = Router::new();
    for (path, answer) in answers {
        let down = Arc::clone(&down);
        let respond = move || async move {
            match down.load(Ordering::SeqCst) {
                true => Err(axum::http::StatusCode::INTERNAL_SERVER_ERROR),
                false => Ok(Json(answer)),
            }
        };
        router = router.route(path, get(respond));
    }
    router
}

/// Waits until the recording has more lines than this.
async fn longer_than(path: &Path, lines: usize) -> usize {
    for _ in 0..600 {
        let now = std::fs::read_to_string(path).unwrap_or_default().lines().count();
        if now > lines {
            return now;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    panic!("{} has no more than {lines} lines after a minute", path.display())
}

/// The recorder goes on while the API server is away, ends well when it is told to, and what it wrote is what `suggest` reads.
#[tokio::test(flavor = "multi_thread")]
async fn a_recorder_without_a_terminal_goes_on_until_it_is_stopped() {
    let down = Arc::new(AtomicBool::new(false));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let router = cluster(Arc::clone(&down));
    tokio::spawn(async move { axum::serve(listener, router).await });
    let files = Files::new();
    let kubeconfig = json!({"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}], "users": [{"name": "u", "user": {}}]});
    let kubeconfig = files.write("kubeconfig", &kubeconfig.to_string());
    let recording = files.path("use.jsonl");
    let mut recorder = tokio::process::Command::new(assert_cmd::cargo::cargo_bin("gpu-migrate"))
        .args(["top", "--interval", "1", "--kubeconfig", &kubeconfig, "--record"])
        .arg(&recording)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    longer_than(&recording, 1).await;
    down.store(true, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(recorder.try_wait().unwrap().is_none(), "it goes on");
    down.store(false, Ordering::SeqCst);
    let lines = std::fs::read_to_string(&recording).unwrap().lines().count();
    longer_than(&recording, lines).await;
    let pid = recorder.id().unwrap().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let output = recorder.wait_with_output().await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b""[..]), "{said}");
    assert!(said.starts_with("warning: ") && said.contains("try again later"), "{said}");

    let lines = std::fs::read_to_string(&recording).unwrap();
    let first: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
    let expected = json!({"time": first["time"], "node": "gpu-01", "project": "danlu", "card": "GPU-0", "model": "NVIDIA L40S",
        "cardMemoryBytes": 48 * GIB, "namespace": "danlu", "pod": "web-0", "container": "main", "kind": "legacy", "processes": 1,
        "utilizationPercent": 30, "memoryUsedBytes": 6 * GIB, "coresRequested": 100, "memoryRequestedBytes": 48 * GIB});
    assert_eq!(first, expected);
    let recording = recording.to_str().unwrap().to_owned();
    let once = ["top", "--once", "--kubeconfig", &kubeconfig, "--record", &recording].map(str::to_owned);
    let (code, out, err) = suggest(once.into()).await;
    assert!(
        code == 0 && out.contains("No node reports its cards"),
        "with --once it shows the tables too: {out}{err}"
    );
    let now = std::fs::read_to_string(&recording).unwrap().lines().count();
    assert_eq!(now, lines.lines().count() + 1);
    let line = [
        "suggest",
        "--recording",
        &recording,
        "--kubeconfig",
        &kubeconfig,
        "--min-samples",
        "2",
        "--min-span",
        "0h",
    ];
    let (code, out, err) = suggest(line.map(str::to_owned).into()).await;
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert!(
        out.contains("+++ GPUMigration danlu (proposed)") && out.contains("+    - blocksPerCard: 29"),
        "{out}"
    );
}

/// The samples of a recording in the text form that Prometheus imports.
fn as_metrics(recording: &str) -> String {
    let lines: Vec<Value> = recording.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let prefix = "gpu_migrate_node_agent_";
    let of_card = ["node", "UUID", "modelName"];
    let of_container = ["node", "UUID", "namespace", "pod", "container", "kind"];
    let families: [(&str, &[&str], &str, f64); 5] = [
        ("card_memory_bytes", &of_card, "cardMemoryBytes", 1.0),
        ("container_memory_used_bytes", &of_container, "memoryUsedBytes", 1.0),
        ("container_memory_requested_bytes", &of_container, "memoryRequestedBytes", 1.0),
        ("container_utilization_ratio", &of_container, "utilizationPercent", 0.01),
        ("container_requested_ratio", &of_container, "coresRequested", 0.01),
    ];
    let mut text = String::new();
    for (name, labels, field, unit) in families {
        text += &format!("# TYPE {prefix}{name} gauge\n");
        for line in &lines {
            let of_line = |label: &str| match label {
                "UUID" => line["card"].clone(),
                "modelName" => line["model"].clone(),
                other => line[other].clone(),
            };
            let labels: Vec<String> =
                labels.iter().map(|label| format!("{label}={}", of_line(label))).collect();
            let time: Timestamp = line["time"].as_str().unwrap().parse().unwrap();
            let value = line[field].as_f64().unwrap() * unit;
            text += &format!("{prefix}{name}{{{}}} {value} {}\n", labels.join(","), time.as_second());
        }
    }
    text + "# EOF\n"
}

/// Killed when dropped.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A Prometheus that has these samples, ready at this port; nothing where a program is missing.
fn prometheus_with(files: &Files, metrics: &str) -> Option<(Server, u16)> {
    let (metrics, data) = (files.write("metrics.txt", metrics), files.path("data"));
    let import = std::process::Command::new("promtool")
        .args(["tsdb", "create-blocks-from", "openmetrics", &metrics])
        .arg(&data)
        .output()
        .ok()?;
    assert!(import.status.success(), "{}", String::from_utf8_lossy(&import.stderr));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = files.write("prometheus.yaml", "{}");
    let child = std::process::Command::new("prometheus")
        .arg(format!("--config.file={config}"))
        .arg(format!("--storage.tsdb.path={}", data.display()))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .stderr(std::process::Stdio::null())
        .spawn()
        .ok()?;
    let server = Server(child);
    let ready = || -> std::io::Result<bool> {
        use std::io::{Read as _, Write as _};
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(b"GET /-/ready HTTP/1.0\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.contains(" 200 "))
    };
    for _ in 0..600 {
        if ready().unwrap_or(false) {
            return Some((server, port));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    panic!("Prometheus is not ready");
}

#[test]
fn a_real_prometheus_gives_the_proposal_of_the_recording() {
    let files = Files::new();
    // A day and two hours back from now, every five minutes.
    let now = Timestamp::from_second(Timestamp::now().as_second() / 300 * 300).unwrap();
    let begin = now - 26.hours();
    let sample = |pod: u64, minute: u64| {
        let memory = if minute == 600 { 3 * GIB } else { GIB + pod * (GIB / 4) };
        let mut line: Value =
            serde_json::from_str(&line(0, "danlu", pod, (minute / 5 + pod) % 37, memory)).unwrap();
        line["time"] = json!(begin + (minute as i64).minutes());
        line.to_string() + "\n"
    };
    let all: String =
        (0..4).flat_map(|pod| (0..=1560).step_by(5).map(move |minute| sample(pod, minute))).collect();
    let Some((_server, port)) = prometheus_with(&files, &as_metrics(&all)) else {
        gpu_migrate_tests::skipped(
            "no promtool or no prometheus on the PATH (`prepare promtool prometheus` builds them)",
        );
        return;
    };
    let (recording, url) = (files.write("use.jsonl", &all), format!("http://127.0.0.1:{port}"));
    let from = files.write("policies.json", &policies().to_string());
    let recorded = run(&["suggest", "--recording", &recording, "--from", &from, "-o", "yaml"]);
    let asked = run(&["suggest", "--prometheus", &url, "--window", "2d", "--from", &from, "-o", "yaml"]);
    assert_eq!(recorded.0, 0, "{}", recorded.2);
    assert!(recorded.1.contains("coresPerCard: 45"), "the p95 of 34.4 and a fifth: {}", recorded.1);
    assert_eq!(asked.1, recorded.1, "{}", asked.2);
}

//! `verify isolation`: its Job, its table, and a measurement; what it measures is tested with the verifier.

#![allow(clippy::unwrap_used)]

use assert_cmd::Command;
use k8s_openapi::api::batch::v1::Job;
use serde_json::json;

fn run(args: &[&str]) -> (i32, String, String) {
    let output =
        Command::cargo_bin("gpu-migrate").unwrap().args(["verify", "isolation"]).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_job_measures_in_a_share_of_its_node() {
    let flags = [
        "--job",
        "--node=gpu-07",
        "--isolation=hami-core",
        "--blocks=8",
        "-n",
        "team",
        "--runtime-class=nvidia",
    ];
    let (code, text, _) = run(&flags);
    assert_eq!(code, 0);
    let job: Job = serde_saphyr::from_str(&text).unwrap();
    let pod = job.spec.unwrap().template.spec.unwrap();
    assert_eq!(job.metadata.namespace.as_deref(), Some("team"));
    assert_eq!(pod.scheduler_name.as_deref(), Some("gpu-migrate-scheduler"));
    assert_eq!(pod.runtime_class_name.as_deref(), Some("nvidia"));
    assert_eq!(pod.node_selector.unwrap()["kubernetes.io/hostname"], "gpu-07");
    let container = &pod.containers[0];
    let limits = container.resources.as_ref().unwrap().limits.as_ref().unwrap();
    assert_eq!(limits["tencent.com/vcuda-memory"].0, "8");
    assert_eq!(limits["tencent.com/vcuda-core"].0, "10");
    assert!(container.image.as_ref().unwrap().ends_with(concat!(":", env!("CARGO_PKG_VERSION"))));
    // The container's arguments are a command line of this program.
    let arguments = container.args.clone().unwrap();
    assert_eq!(arguments[..2], ["verify", "isolation"]);
    assert_eq!(arguments[2..], ["--blocks=8", "--isolation=hami-core", "--output=table"]);
    // In JSON it is the same, but for what the container prints.
    let (_, as_json, _) = run(&[&flags[..], &["-o", "json"]].concat());
    assert_eq!(as_json.matches("--output=json").count(), 1);
    serde_json::from_str::<Job>(&as_json).unwrap();

    let (code, _, error) = run(&["--node=gpu-07"]);
    assert_eq!(code, 2, "{error}");
    assert_eq!(run(&["--job", "--cores=100"]).0, 2, "a whole card is not limited");
}

#[test]
fn reports_in_either_form_become_one_table() {
    let folder = tempfile::tempdir().unwrap();
    let report = json!({"isolation": "driver", "limit_mib": 1024, "clients": [{"client": "C, CUDA 13",
        "shown": {"free": 1024, "total": 1024, "device": 1024}, "functions": {},
        "findings": [{"probe": "malloc", "verdict": "held", "mib": 1024}, {"probe": "managed", "verdict": "exceeded", "mib": 1088}]}]});
    let [data, yaml, other] = ["a.json", "b.yaml", "c.yaml"].map(|name| folder.path().join(name));
    std::fs::write(&data, report.to_string()).unwrap();
    std::fs::write(&yaml, serde_saphyr::to_string(&report).unwrap().replace("driver", "mps")).unwrap();
    let paths = [&data, &yaml].map(|path| path.to_str().unwrap());
    let (code, table, _) = run(&["--table", paths[0], paths[1]]);
    assert_eq!(code, 0);
    for isolation in ["driver", "mps"] {
        let row = format!("| {isolation} | C, CUDA 13 | 1024 MiB | 1 of 2 | managed (exceeded) | 1024 MiB |");
        assert!(table.contains(&row), "{table}");
    }
    assert!(table.contains("| `vcuda` on a card | all | | not run |"), "{table}");

    std::fs::write(&other, "kind: Job").unwrap();
    let (code, _, error) = run(&["--table", other.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(error.contains("c.yaml is no report of `verify isolation -o json`"), "{error}");
}

/// On a machine with an idle card it is measured, on any other the report says what is missing: both are a no.
#[test]
fn a_measurement_without_a_limit_is_a_no() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::cargo_bin("gpu-migrate")
        .unwrap()
        .args(["verify", "isolation", "--blocks=1", "--isolation=none"])
        .env("TMPDIR", folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.starts_with("isolation none, limit 256 MiB\n\nC, CUDA 11"), "{text}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "its programs are removed");
}

//! `gpu-migrate verify isolation`: how much memory of a card programs get in this container.

use std::io::Write;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;

use anyhow::Context as _;
use gpu_migrate_model::names::{Dialect, SCHEDULER};
use gpu_migrate_model::units::Blocks;
use gpu_migrate_verifier::{Client, Report, Setting, measure, report, unpack};
use serde_json::{Value, json};

use crate::args::IsolationArgs;
use crate::cluster::{Answer, Output};
use crate::exit::Exit;
use crate::plan::diff::to_yaml;

pub(crate) fn command(args: &IsolationArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    if args.job {
        let job = job(args);
        match args.output {
            Output::Json => writeln!(out, "{job:#}")?,
            Output::Table | Output::Yaml => out.write_all(to_yaml(&job).as_bytes())?,
        }
        return Ok(Exit::Done);
    }
    if !args.table.is_empty() {
        let read = |path: &PathBuf| -> anyhow::Result<Report> {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            // JSON is YAML, too.
            serde_saphyr::from_str(&text).with_context(|| {
                format!("{} is no report of `verify isolation -o json` or `-o yaml`", path.display())
            })
        };
        let reports = args.table.iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
        out.write_all(report::table(&reports).as_bytes())?;
        return Ok(Exit::Done);
    }
    let report = run(args)?;
    let exit = if report.holds() { Exit::Done } else { Exit::No };
    Ok(Answer { text: report.text(), value: serde_json::to_value(&report)?, exit }.write(args.output, out)?)
}

/// Measures with all clients, from a folder that is removed again.
fn run(args: &IsolationArgs) -> anyhow::Result<Report> {
    let folder = std::env::temp_dir().join(format!("gpu-migrate-verify-{}", std::process::id()));
    // Nobody else may put a program there.
    std::fs::DirBuilder::new().mode(0o700).create(&folder).with_context(|| {
        format!("cannot make {} for the programs that measure; set TMPDIR", folder.display())
    })?;
    let report = (|| {
        let (program, script) = unpack(&folder)
            .with_context(|| format!("cannot write the programs that measure to {}", folder.display()))?;
        let setting = Setting { limit_mib: Blocks(args.blocks).mib(), environment: Vec::new() };
        let mut clients = Client::of_c(&program);
        for python in &args.python {
            let client = Client::of_python(python, &script, &setting);
            clients.push(client.with_context(|| {
                format!("--python {}: it needs the package cuda-bindings", python.display())
            })?);
        }
        let measured = clients.iter().map(|client| measure(client, &setting)).collect();
        Ok(Report { isolation: args.isolation.clone(), limit_mib: setting.limit_mib, clients: measured })
    })();
    // What stays is two small files.
    let _ = std::fs::remove_dir_all(&folder);
    report
}

/// A Job of one shared pod, as any other.
fn job(args: &IsolationArgs) -> Value {
    let dialect = Dialect::default();
    let mut pod = json!({
        "schedulerName": SCHEDULER,
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        // Of the node's pool, whatever it is.
        "tolerations": [{"operator": "Exists"}],
        "securityContext": {"runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{
            "name": "verify",
            "image": args.image,
            "args": ["verify", "isolation", format!("--blocks={}", args.blocks), format!("--isolation={}", args.isolation), format!("--output={}", name(args.output))],
            // The driver's library; NVML alone is not enough.
            "env": [{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"}],
            "resources": {"limits": {dialect.cores.as_str(): args.cores.to_string(), dialect.memory.as_str(): args.blocks.to_string()}},
            "securityContext": {"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}},
            "volumeMounts": [{"name": "programs", "mountPath": "/tmp"}],
        }],
        "volumes": [{"name": "programs", "emptyDir": {"sizeLimit": "16Mi"}}],
    });
    if let Some(node) = &args.node {
        pod["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    }
    if let Some(class) = &args.runtime_class {
        pod["runtimeClassName"] = json!(class);
    }
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "gpu-migrate-verify-isolation", "namespace": args.namespace, "labels": {"app.kubernetes.io/name": "gpu-migrate"}},
        // What was measured is in the log: once is enough.
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": 86400, "template": {"spec": pod}},
    })
}

fn name(output: Output) -> &'static str {
    match output {
        Output::Table => "table",
        Output::Json => "json",
        Output::Yaml => "yaml",
    }
}

//! `gpu-migrate simulate`: its arguments, and what it prints.

mod args;

use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};

use gpu_migrate_model::names::Dialect;
use gpu_migrate_model::units::{Blocks, Cores};
use gpu_migrate_webhook::compile::Rejected;
use gpu_migrate_webhook::policy_file::PolicyFile;
use indicatif::{ProgressBar, ProgressStyle};

use crate::node::BindError;
use crate::snapshot::html::{html, of_replay};
use crate::snapshot::migrate::{Gain, migrate};
use crate::snapshot::plan::Plan;
use crate::snapshot::read::{Snapshot, SnapshotError};
use crate::snapshot::report::{csv, json, table};
use crate::trace::plot::{Curve, draw};
use crate::trace::read::{self, TraceError};
use crate::trace::replay::Setup;
use crate::trace::{experiment, report};

pub use args::{Output, SimulateArgs};

/// Why a simulation did not come to its end.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {source}", path.display())]
    Snapshot { path: PathBuf, source: SnapshotError },
    #[error("{}: {rejected}", path.display())]
    Policy { path: PathBuf, rejected: String },
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("{}: {source}", path.display())]
    Write {
        /// The file or folder; `stdout`.
        path: PathBuf,
        source: io::Error,
    },
    #[error("CSV: {0}")]
    Csv(#[from] csv::Error),
}

/// Runs the command and prints its result to `out`. The progress bar goes to stderr, on a terminal alone.
///
/// # Errors
/// [`SimulateError`].
pub fn run(args: &SimulateArgs, out: &mut dyn Write) -> Result<(), SimulateError> {
    let text = match (&args.trace_nodes, &args.trace_pods, &args.snapshot) {
        (Some(nodes), Some(pods), _) => replay(args, nodes, pods)?,
        (_, _, Some(file)) => gains(args, file)?,
        // clap asks for one of the two.
        _ => String::new(),
    };
    out.write_all(text.as_bytes()).map_err(|source| SimulateError::Write { path: "stdout".into(), source })
}

fn replay(args: &SimulateArgs, nodes: &Path, pods: &Path) -> Result<String, SimulateError> {
    let setup = Setup {
        nodes: read::nodes(nodes)?,
        pods: read::pods(pods)?,
        ratio: args.ratio,
        mix: args.mix,
        plain: args.plain_pods,
    };
    let policies = args.policies();
    let bar = bar(policies.len() * args.seeds.0.len());
    let outcomes = experiment::run(&setup, &policies, &args.seeds.0, args.threads(), |policy, seed| {
        bar.set_message(format!("{policy:?} {seed}"));
        bar.inc(1);
    })?;
    bar.finish_and_clear();
    if let Some(folder) = &args.plot {
        for curve in [Curve::Allocated, Curve::Fragmented] {
            write(folder, curve.file(), &draw(&outcomes, curve))?;
        }
    }
    Ok(match args.output {
        Output::Table => report::table(&setup, &args.seeds.0, &outcomes),
        Output::Csv => report::csv(&outcomes)?,
        Output::Json => report::json(&setup, &args.seeds.0, &outcomes),
        Output::Html => {
            let plots = [Curve::Allocated, Curve::Fragmented].map(|curve| draw(&outcomes, curve));
            of_replay(&plots, &report::table(&setup, &args.seeds.0, &outcomes))
        }
    })
}

fn gains(args: &SimulateArgs, file: &Path) -> Result<String, SimulateError> {
    let dialect = Dialect::default();
    let snapshot = if file.as_os_str() == "-" {
        Snapshot::read(io::stdin().lock(), &dialect)
    } else {
        let file =
            File::open(file).map_err(|source| SimulateError::Read { path: file.to_owned(), source })?;
        Snapshot::read(file, &dialect)
    };
    let snapshot = snapshot.map_err(|source| SimulateError::Snapshot { path: file.to_owned(), source })?;
    let rejected = |path: Option<&PathBuf>| {
        let path = path.cloned().unwrap_or_else(|| "--cores, --blocks".into());
        move |rejected: Vec<Rejected>| SimulateError::Policy { path, rejected: list(&rejected) }
    };
    let plans = match &args.policy_file {
        Some(path) => {
            let policies = PolicyFile::parse(&read_text(path)?)
                .map_err(|why| SimulateError::Policy { path: path.clone(), rejected: why.to_string() })?;
            vec![Plan::of_file(policies, &snapshot).map_err(rejected(Some(path)))?]
        }
        None => args
            .cores
            .iter()
            .map(|cores| {
                Plan::of_ratio(Cores(*cores), args.blocks.map(Blocks), &snapshot).map_err(rejected(None))
            })
            .collect::<Result<_, _>>()?,
    };
    let mut gains = Vec::new();
    // Each has a cluster of its own in memory: no more at a time than there are processors.
    for plans in plans.chunks(args.threads()) {
        gains.extend(at_once(plans, |plan| migrate(&snapshot, plan, args.scoring))?);
    }
    Ok(match args.output {
        Output::Table => table(&snapshot, &gains),
        Output::Csv => csv(&gains)?,
        Output::Json => json(&snapshot, &gains),
        Output::Html => html(&snapshot, &gains),
    })
}

/// Each plan on a thread.
fn at_once(
    plans: &[Plan],
    run: impl Fn(&Plan) -> Result<Gain, BindError> + Sync,
) -> Result<Vec<Gain>, BindError> {
    let run = &run;
    std::thread::scope(|scope| {
        let running = plans.iter().map(|plan| scope.spawn(move || run(plan))).collect::<Vec<_>>();
        let ended = running.into_iter().map(|one| one.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.collect()
    })
}

fn list(rejected: &[Rejected]) -> String {
    rejected.iter().map(|one| format!("policy {}: {}", one.name, one.reason)).collect::<Vec<_>>().join("; ")
}

fn read_text(path: &Path) -> Result<String, SimulateError> {
    std::fs::read_to_string(path).map_err(|source| SimulateError::Read { path: path.to_owned(), source })
}

fn bar(replays: usize) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} replays, {eta} left  {msg}");
    ProgressBar::new(replays as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn write(folder: &Path, file: &str, text: &str) -> Result<(), SimulateError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| SimulateError::Write { path, source }
    };
    std::fs::create_dir_all(folder).map_err(failed(folder))?;
    let path = folder.join(file);
    std::fs::write(&path, text).map_err(failed(&path))
}

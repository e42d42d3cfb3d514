//! gpu-migrate, the command line of the migration.
//!
//! Offline commands (`plan`, `simulate`, `demo`, `crds`, `completion`, `man`) need no cluster; those in [`cluster`] look at one, or at a dump
//! of one. What decides is pure and stands in modules of its own; what reads files and writes to the terminal is thin
//! and here.

pub mod args;
pub mod cluster;
pub mod complete;
pub mod crds;
pub mod errors;
pub mod exit;
mod isolation;
pub mod manifest;
pub mod plan;
mod progress;
pub mod style;
pub mod suggest;
mod toolbox;

use anyhow::Context as _;
use args::{Cli, Command, PlanArgs, PlanOutput};
use exit::Exit;
use manifest::{expand_packed, packed, read_inputs, without_controlled};
use std::io::{self, Read, Write};

/// Runs one command on this process's streams.
///
/// # Errors
/// What stopped the command; what only concerns one of many inputs is printed and counted into the exit status.
pub fn run(cli: Cli) -> anyhow::Result<Exit> {
    let (mut out, mut err) = (io::BufWriter::new(anstream::stdout().lock()), anstream::stderr());
    let exit = match cli.command {
        Command::Plan(args) if args.filename.is_empty() => plan_live(&args, &mut out, &mut err)?,
        Command::Plan(args) => plan_command(&args, &mut io::stdin(), &mut out, &mut err)?,
        Command::Simulate(args) => {
            let mut text = Vec::new();
            gpu_migrate_replay::command::run(&args, &mut text)?;
            let is_table = args.output == gpu_migrate_replay::command::Output::Table;
            let text = String::from_utf8_lossy(&text);
            out.write_all(style::fit(&text, style::window().filter(|_| is_table)).as_bytes())?;
            Exit::Done
        }
        Command::Demo(args) => {
            // It draws on the terminal itself.
            drop(out);
            return demo(args);
        }
        Command::Preflight(args) => {
            let snapshot = cluster::runtime(args.cluster.snapshot_with_settings())?;
            cluster::preflight::preflight(&snapshot).write(args.output, &mut out)?
        }
        Command::Top(args) => cluster::top::command(&args, &mut out)?,
        Command::Suggest(args) => suggest::command(&args, &mut out, &mut err)?,
        Command::Status(args) => cluster::status::command(&args, &mut out)?,
        Command::Verify(args::VerifyArgs { what: Some(args::VerifyCommand::Isolation(args)), .. }) => {
            isolation::command(&args, &mut out)?
        }
        Command::Verify(args) if args.install => {
            let installation = cluster::runtime(cluster::install::read(&args))?;
            cluster::install::verify(&installation, k8s_openapi::jiff::Timestamp::now())
                .write(args.look.output, &mut out)?
        }
        Command::Verify(args) => look(&args.look, &mut out, cluster::verify::verify)?,
        Command::Rollout(args) => cluster::runtime(cluster::rollout(&args, &mut out))?,
        Command::CordonCard(args) => cluster::runtime(cluster::cordon_card(&args, &mut out))?,
        Command::Quota(args) => {
            let args::QuotaCommand::Translate(args) = args.command;
            cluster::runtime(cluster::quota::command(&args, &mut out, &mut err))?
        }
        Command::Uninstall(args) => cluster::runtime(cluster::uninstall(&args, &mut out))?,
        Command::Crds(args) => toolbox::crds(&args, &mut out).map(|()| Exit::Done)?,
        Command::Completion(args) => toolbox::completion(&args, &mut out).map(|()| Exit::Done)?,
        Command::Man(args) => toolbox::man(&args, &mut out)
            .map(|()| Exit::Done)
            .with_context(|| format!("man pages in {}", args.dir.display()))?,
    };
    out.flush()?;
    Ok(exit)
}

/// `gpu-migrate demo` in a build without it.
#[cfg(not(feature = "demo"))]
fn demo(_: args::NoDemoArgs) -> anyhow::Result<Exit> {
    anyhow::bail!(
        "the demo is not in this build: run `cargo run --release --features demo -- demo`, or take a released binary"
    )
}

/// `gpu-migrate demo`. A broken invariant would be the answer no.
#[cfg(feature = "demo")]
fn demo(args: gpu_migrate_demo::DemoArgs) -> anyhow::Result<Exit> {
    // The only failure is that a provider is installed already.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    // Many programs of the demo run at once: they need threads.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(gpu_migrate_demo::run(args))?;
    Ok(if outcome.violations.total() == 0 { Exit::Done } else { Exit::No })
}

/// A command that only reads.
fn look(
    args: &args::LookArgs,
    out: &mut dyn Write,
    decide: impl FnOnce(&cluster::Snapshot) -> cluster::Answer,
) -> anyhow::Result<Exit> {
    let snapshot = cluster::runtime(args.cluster.snapshot())?;
    Ok(decide(&snapshot).write(args.output, out)?)
}

/// `gpu-migrate plan`: read, decide, show.
///
/// # Errors
/// When the output cannot be written.
pub fn plan_command(
    args: &PlanArgs,
    stdin: &mut dyn Read,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> io::Result<Exit> {
    let (inputs, unread) = read_inputs(&args.filename, args.recursive, stdin);
    let errors = unread.iter().map(ToString::to_string).collect();
    plan_and_show(args, inputs, Vec::new(), errors, out, err)
}

/// `gpu-migrate plan` without files: what is in the cluster, by its policies and those of --policy.
fn plan_live(args: &PlanArgs, out: &mut dyn Write, err: &mut dyn Write) -> anyhow::Result<Exit> {
    let (manifests, unread) = cluster::runtime(async {
        let client = args.reach.client().await.context("without -f the plan is of a cluster")?;
        cluster::live::manifests(&client, args.namespace.as_deref()).await
    })?;
    Ok(plan_and_show(args, Vec::new(), manifests, unread, out, err)?)
}

fn plan_and_show(
    args: &PlanArgs,
    inputs: Vec<manifest::Input>,
    mut manifests: Vec<manifest::Manifest>,
    mut errors: Vec<String>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> io::Result<Exit> {
    let (policies, unread) = read_inputs(&args.policy, args.recursive, &mut io::empty());
    errors.extend(unread.iter().map(ToString::to_string));
    let mut of_files = Vec::new();
    let place = if inputs.is_empty() { "in the cluster" } else { "among the files" };
    for input in inputs.into_iter().chain(policies) {
        let (found, broken) = packed(&input);
        // The text of a dump is most of the memory.
        drop(input);
        let (objects, wrong) = expand_packed(found);
        of_files.extend(objects);
        errors.extend(broken.iter().map(ToString::to_string));
        errors.extend(wrong.iter().map(ToString::to_string));
    }
    manifests.extend(without_controlled(of_files));
    let (rules, problems) = plan::decide::Rules::take_from(&mut manifests);
    errors.extend(problems.iter().map(ToString::to_string));
    let plan = plan::decide::decide(manifests, &rules, args.namespace.as_deref().unwrap_or("default"));

    show(&plan, args, out, err)?;
    out.flush()?;
    for error in &errors {
        writeln!(err, "{} {error}", style::paint(style::REMOVED, "error:"))?;
    }
    let unlisted = errors.iter().any(|error| error.starts_with("gpumigrations"));
    if rules.policy_count == 0 && !plan.entries.is_empty() && !unlisted {
        let hint =
            format!("no policy (GPUMigration) {place}, so nothing is converted; give one with --policy");
        writeln!(err, "{} {hint}", style::paint(style::WARNING, "warning:"))?;
    }
    Ok(match (errors.is_empty(), plan.has_unconvertible()) {
        (false, _) => Exit::Failed,
        (true, true) => Exit::No,
        (true, false) => Exit::Done,
    })
}

fn show(plan: &plan::Plan, args: &PlanArgs, out: &mut dyn Write, err: &mut dyn Write) -> io::Result<()> {
    let titles = !args.no_headers;
    let beside = |err: &mut dyn Write| plan::show::summary(plan, titles, err);
    match args.output {
        PlanOutput::Diff => {
            plan::show::diffs(plan, args.unified, out)?;
            plan::show::summary(plan, titles, out)
        }
        PlanOutput::Summary => plan::show::summary(plan, titles, out),
        // The summary goes beside what a program reads.
        PlanOutput::Patch => plan::show::patches(plan, out).and_then(|()| beside(err)),
        PlanOutput::Yaml => plan::show::yaml(plan, out).and_then(|()| beside(err)),
        PlanOutput::Json => plan::show::json(plan, out).and_then(|()| beside(err)),
        PlanOutput::Name => plan::show::names(plan, out).and_then(|()| beside(err)),
    }
}

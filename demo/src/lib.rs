//! `gpu-migrate demo`: the whole product on a machine with nothing but this program. A story, told on an embedded cluster with the real
//! webhook, extender, operator and node agents; an observer that trusts none of them counts what must not be.

mod map;
mod objects;
mod observer;
mod process;
mod report;
mod screen;
mod script;
mod stage;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use gpu_migrate_model::crd::MigrationPhase;
use gpu_migrate_runtime::trace::TraceArgs;

pub use self::map::MapNode;
pub use self::observer::{Cards, Use, Violations};
pub use self::report::{Outcome, render as render_outcome};
pub use self::script::{NodeScript, Script, Step};
pub use self::stage::Fault;

use self::screen::Screen;
use self::stage::Stage;

/// How long a step may take that waits for something.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long the killed agent and the restarting kubelet are away.
const AWAY: Duration = Duration::from_millis(300);

/// What to try on the cluster of the demo.
const ON_ITS_CLUSTER: &str =
    "  gpu-migrate status             each card and who is on it, and how far the project is
  kubectl get pods,gpushadows -A the same as Kubernetes sees it
  gpu-migrate rollout undo danlu the project goes back to whole cards";
/// What to try after it.
const NEXT: &str = "\
Try next:
  gpu-migrate demo --keep        the same, and its cluster stays up for kubectl and gpu-migrate
  gpu-migrate plan -f examples/  how manifests would be converted, as a diff
  gpu-migrate preflight          whether your cluster is ready; changes nothing";

/// Shows a migration from beginning to end on simulated nodes.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct DemoArgs {
    /// No pauses for the reader
    #[arg(long)]
    pub fast: bool,
    /// Run this script (YAML) instead of the built-in one
    #[arg(long, value_name = "FILE")]
    pub script: Option<PathBuf>,
    /// Stay up afterwards, until Ctrl-C, for kubectl
    #[arg(long)]
    pub keep: bool,
    /// Port of the embedded API server [default: any free one]
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub port: u16,
    /// Port of the status page [default: any free one]
    #[arg(long, value_name = "PORT", default_value_t = 0)]
    pub status_port: u16,
    #[command(flatten)]
    pub trace: TraceArgs,
    /// Break something, to see the observer notice
    #[arg(long, hide = true, value_enum)]
    pub fault: Option<Fault>,
}

/// Runs the script. The closing table is printed; what it says is returned.
///
/// Logs of all parts go to `demo.log` in a temporary folder, unless a tracing subscriber was installed before.
///
/// # Errors
/// A script that cannot be read, a step that did not come to pass, a part that ended.
pub async fn run(args: DemoArgs) -> anyhow::Result<Outcome> {
    // Exhaustive, so that a flag that is not read does not compile.
    let DemoArgs { fast, script, keep, port, status_port, trace, fault } = args;
    let script = Script::load(script.as_deref())?;
    // A provider that was installed before is as good.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let folder = tempfile::Builder::new().prefix("gpu-migrate-").tempdir().context("a temporary folder")?;
    log_to(&folder.path().join("demo.log"));
    let stage = Stage::build(folder.path(), [port, status_port], &script.nodes, &trace, fault).await?;
    let nodes = map_nodes(&stage, &script);
    let screen = Screen::new(nodes, stage.observer.clone());
    let mut teller = Teller { stage, screen, fast, before: None, began: Instant::now() };
    teller.screen.say(&format!("The same in a browser: {}", teller.stage.status_page));
    if keep {
        teller.screen.say(&format!("export KUBECONFIG={}", teller.stage.kubeconfig.display()));
    }
    let story = async {
        for step in &script.steps {
            teller.tell(step).await?;
        }
        Ok(())
    };
    let told = tokio::select! {
        told = story => Some(told),
        interrupted = interrupted() => interrupted.err().map(Err),
    };
    let Some(told) = told else {
        teller.screen.say("Stopped. Nothing of it is left on this machine.");
        return Ok(teller.outcome());
    };
    if let Err(error) = told {
        // The log is what explains it.
        let kept = folder.keep();
        return Err(error.context(format!("logs are in {}", kept.join("demo.log").display())));
    }
    let outcome = teller.outcome();
    teller.screen.say("The end:");
    println!("{}", render_outcome(&outcome));
    if keep {
        let kubeconfig = teller.stage.kubeconfig.display();
        let page = &teller.stage.status_page;
        println!(
            "The cluster stays up until Ctrl-C, its status page at {page}:\n  export KUBECONFIG={kubeconfig}\n{ON_ITS_CLUSTER}"
        );
        interrupted().await?;
        println!("Stopped. Nothing of it is left on this machine.");
    } else {
        println!("{NEXT}");
    }
    Ok(outcome)
}

/// SIGINT or SIGTERM.
async fn interrupted() -> anyhow::Result<()> {
    let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    tokio::select! {
        interrupt = tokio::signal::ctrl_c() => Ok(interrupt?),
        _ = term.recv() => Ok(()),
    }
}

fn map_nodes(stage: &Stage, script: &Script) -> Vec<MapNode> {
    let node = |one: &NodeScript| {
        stage.nodes.get(&one.name).map(|n| MapNode { script: n.script.clone(), cards: n.cards.clone() })
    };
    script.nodes.iter().filter_map(node).collect()
}

fn log_to(path: &std::path::Path) {
    let Ok(file) = std::fs::File::create(path) else { return };
    let filter = tracing_subscriber::EnvFilter::try_from_env("GPU_MIGRATE_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    // Fails where there is one already; then logs go there.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(false)
        .with_writer(std::sync::Mutex::new(file))
        .try_init();
}

/// Runs the steps of the story.
struct Teller {
    stage: Stage,
    screen: Screen,
    fast: bool,
    before: Option<usize>,
    began: Instant,
}

impl Teller {
    async fn tell(&mut self, step: &Step) -> anyhow::Result<()> {
        tracing::info!(?step, "step");
        match step {
            Step::Say(text) => self.screen.say(text),
            Step::Pause(seconds) => self.pause(Duration::from_secs_f64(seconds.clamp(0.0, 600.0))).await?,
            Step::Apply(object) => objects::apply(&self.stage.client, object).await?,
            Step::Delete(object) => objects::delete(&self.stage.client, object).await?,
            Step::Ready { namespace, pods } => self.until_pods(namespace, *pods, false).await?,
            Step::Converted { namespace, pods } => self.until_pods(namespace, *pods, true).await?,
            Step::Phase { migration, is } => self.until_phase(migration, *is).await?,
            Step::Before => self.before = Some(self.stage.observer.cards().len()),
            Step::RestartKubelet { node } => self.node(node)?.kubelet.restart(AWAY).await?,
            Step::CrashAgent { node } => self.node(node)?.crash_agent(AWAY).await?,
            Step::StaleCheckpoint { node } => self.node(node)?.stale_checkpoint(AWAY).await?,
            Step::CopyCheckpoint { node } => self.node(node)?.copy_checkpoint()?,
        }
        Ok(())
    }

    fn node(&mut self, name: &str) -> anyhow::Result<&mut stage::StageNode> {
        self.stage.nodes.get_mut(name).with_context(|| format!("node {name:?} is not in the story"))
    }

    async fn pause(&mut self, time: Duration) -> anyhow::Result<()> {
        let until = Instant::now() + if self.fast { Duration::ZERO } else { time };
        while Instant::now() < until {
            self.beat().await?;
        }
        Ok(())
    }

    async fn beat(&mut self) -> anyhow::Result<()> {
        self.stage.check()?;
        self.screen.show();
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(())
    }

    async fn until_pods(&mut self, namespace: &str, wanted: usize, converted: bool) -> anyhow::Result<()> {
        let began = Instant::now();
        loop {
            let pods = objects::pods(&self.stage.client, namespace).await?;
            let there = if converted {
                pods.converted >= wanted
            } else {
                pods.ready == wanted && pods.unsettled == 0
            };
            if there {
                return Ok(());
            }
            anyhow::ensure!(
                began.elapsed() < PATIENCE,
                "namespace {namespace}: {wanted} pods were waited for, there are {pods:?}"
            );
            self.beat().await?;
        }
    }

    async fn until_phase(&mut self, name: &str, wanted: MigrationPhase) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut told = String::new();
        loop {
            let status =
                objects::migration(&self.stage.client, name).await?.and_then(|migration| migration.status);
            if status.as_ref().is_some_and(|status| status.phase == wanted) {
                return Ok(());
            }
            // A failure that the story has just mended is not told again.
            let failed = status.as_ref().is_some_and(|status| status.phase == MigrationPhase::Failed);
            let conditions = status.iter().filter(|_| !failed).flat_map(|status| &status.conditions);
            let message = conditions.filter(|c| c.type_ == "Ready").map(|c| c.message.clone()).next();
            // What it waits for, once; the seconds that it counts down are not news.
            let words = |text: &str| text.replace(|sign: char| sign.is_ascii_digit(), "");
            if let Some(message) = message.filter(|message| words(message) != words(&told)) {
                self.screen.say(&format!("  {message}"));
                told = message;
            }
            anyhow::ensure!(
                began.elapsed() < PATIENCE,
                "GPUMigration {name}: {wanted:?} was waited for, it is {status:?}"
            );
            self.beat().await?;
        }
    }

    fn outcome(&self) -> Outcome {
        let cards = self.stage.observer.cards();
        let all = self.stage.nodes.values().map(|node| node.cards.len()).sum();
        let legacy = |uses: &Vec<Use>| uses.iter().any(|one| one.share.is_none());
        Outcome {
            cards: all,
            before: self.before.unwrap_or(0),
            legacy: cards.values().filter(|uses| legacy(uses)).count(),
            shared: cards.values().filter(|uses| !legacy(uses)).count(),
            sharing: cards.values().flatten().filter(|one| one.share.is_some()).count(),
            started: self.stage.observer.started(),
            violations: self.stage.observer.violations(),
            scheduler: self.stage.scheduler.counts(),
            latencies: self.stage.scheduler.latencies(),
            took: self.began.elapsed(),
        }
    }
}

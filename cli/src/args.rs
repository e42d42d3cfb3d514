//! The command line and its help.

use crate::cluster::{ClusterArgs, ObjectOutput, Output, ReachArgs};
use crate::complete;
use crate::exit;
use crate::style::ColorWhen;
use crate::suggest::Window;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Move a Kubernetes GPU cluster from whole cards to shared cards, one project at a time.
///
/// Pods that ask for nvidia.com/gpu ("legacy") and pods that ask for tencent.com/vcuda-core and -memory
/// ("shared": 100 cores are one card, a block is 256 MiB) live on the same nodes, card by card. A namespace
/// label opts in, a GPUMigration policy says how to convert; everything else stays as it is.
///
/// Start with `plan`: it shows what would change, needs no cluster and changes nothing.
#[derive(Debug, Parser)]
#[command(name = "gpu-migrate", version, after_long_help = exit::HELP, max_term_width = 110, disable_help_subcommand = true)]
pub struct Cli {
    /// When to colour the output.
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        env = "GPU_MIGRATE_COLOR",
        help_heading = "Output"
    )]
    pub color: ColorWhen,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show how manifests or the workloads of a cluster would be converted; changes nothing.
    ///
    /// With -f it needs no cluster, without -f it reads one. Reads Pods, Deployments, StatefulSets, DaemonSets, ReplicaSets, ReplicationControllers, Jobs, CronJobs,
    /// PodTemplates and Lists of them, in YAML or JSON, several documents to a file. Policies (GPUMigration) and the
    /// Namespaces with their labels are taken from the same paths and from --policy. The conversion is the code of
    /// the admission webhook.
    Plan(PlanArgs),
    /// Simulate a migration on a snapshot of a cluster, or placement on a public trace; needs no cluster.
    Simulate(gpu_migrate_replay::command::SimulateArgs),
    /// Show a migration from beginning to end on simulated nodes; needs no cluster and no card.
    #[cfg(feature = "demo")]
    Demo(gpu_migrate_demo::DemoArgs),
    /// Show a migration from beginning to end on simulated nodes (not in this build).
    #[cfg(not(feature = "demo"))]
    Demo(NoDemoArgs),
    /// Check a cluster before a migration: versions, webhook, plugins, quotas, pods. Ends with go or no-go.
    ///
    /// Every finding has a remedy. One no-go makes the result a no-go (exit status 3).
    Preflight(LookArgs),
    /// Show cards and their holders by node, and the progress of each project.
    Status(StatusArgs),
    /// Show what was requested and what is used, holders and pending pods; refreshes on a terminal.
    ///
    /// What is used is asked of the node agents, through the API server: that needs `get` on `pods/proxy` in their namespace.
    Top(TopArgs),
    /// Propose ratios for the policies, from what containers used of their cards over days; changes nothing.
    ///
    /// From a recording of `top --record`, or from a Prometheus that scrapes the node agents. Shows for each project and container what was
    /// seen (median and p95 of the cores, greatest memory), and how the policies would change. `simulate` says how many cards that frees.
    Suggest(SuggestArgs),
    /// Start, pause, resume or roll back the migration of a project.
    Rollout(RolloutArgs),
    /// Translate GPU quotas into vcuda quotas.
    Quota(QuotaArgs),
    /// Exclude cards of a node from new allocations; running containers stay.
    CordonCard(CordonArgs),
    /// Check the whole cluster: no card has two kinds of holders and none is overcommitted.
    ///
    /// From two independent sources: what the node agents report, and the annotations of the pods. With --install: whether what was
    /// installed works, before any project uses it.
    Verify(VerifyArgs),
    /// Remove gpu-migrate: objects, node labels, annotations; refuses while shared pods run.
    ///
    /// The node agents are removed first, and delete their files on the nodes.
    Uninstall(UninstallArgs),
    /// Print the CustomResourceDefinitions of this version.
    Crds(CrdsArgs),
    /// Print what a shell needs to complete commands, flags, and names of policies, nodes and namespaces.
    ///
    /// Names are asked of the cluster that the line is about, for two seconds at most.
    Completion(CompletionArgs),
    /// Write the man pages into a folder.
    Man(ManArgs),
}

/// Arguments of `demo` where it was not built: any.
#[cfg(not(feature = "demo"))]
#[derive(Debug, Args)]
pub struct NoDemoArgs {
    /// Not read.
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub ignored: Vec<std::ffi::OsString>,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
#[command(after_long_help = PLAN_HELP)]
pub struct PlanArgs {
    /// Files or folders with manifests; `-` is stdin. Without: the workloads of the cluster.
    #[arg(short = 'f', long = "filename", value_name = "PATH", num_args = 1.., conflicts_with_all = ["kubeconfig", "context"])]
    pub filename: Vec<PathBuf>,
    /// Search folders with all their subfolders.
    #[arg(short = 'R', long)]
    pub recursive: bool,
    /// A file or folder with the policies and Namespaces, in addition to those among the manifests.
    #[arg(long, value_name = "PATH", env = "GPU_MIGRATE_POLICY", value_delimiter = ':')]
    pub policy: Vec<PathBuf>,
    /// The namespace of objects that name none [default: default]. In a cluster: only this namespace.
    #[arg(short = 'n', long, value_name = "NAME", add = complete::namespaces())]
    pub namespace: Option<String>,
    /// Which cluster, without -f.
    #[command(flatten)]
    pub reach: ReachArgs,
    /// What to print.
    #[arg(short = 'o', long, value_enum, default_value_t, help_heading = "Output")]
    pub output: PlanOutput,
    /// No titles above the columns of the summary.
    #[arg(long, help_heading = "Output")]
    pub no_headers: bool,
    /// Lines of context around a change.
    #[arg(short = 'U', long, value_name = "LINES", default_value_t = 3, help_heading = "Output")]
    pub unified: usize,
}

/// Forms of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum PlanOutput {
    /// A coloured diff of every object that changes, then the summary.
    #[default]
    Diff,
    /// The summary alone.
    Summary,
    /// The RFC 6902 patch of every object that changes, as one JSON array.
    Patch,
    /// The rewritten objects as a YAML stream for `kubectl apply -f -`.
    Yaml,
    /// The rewritten objects as one v1 List, and under `projects` the numbers of the summary.
    Json,
    /// The names of the objects that change, as `kubectl get -o name` writes them.
    Name,
}

const PLAN_HELP: &str = "\
Examples:
  # Convert these manifests by the policies beside them
  gpu-migrate plan -f examples/

  # With the policies of another file; from a chart or a kustomization
  helm template my-release my-chart | gpu-migrate plan --policy policies.yaml -f -
  kubectl kustomize overlays/prod   | gpu-migrate plan --policy policies.yaml -f -

  # The workloads of a cluster, all or of one namespace
  gpu-migrate plan -o summary
  gpu-migrate plan -n danlu --policy policies.yaml

  # What it comes to for each project: pods, cards before and after, what no wave reaches, what is unclear
  gpu-migrate plan -f examples/ -o json | jq .projects

  # The converted objects only, the summary on stderr
  gpu-migrate plan -f examples/ -o yaml > shared.yaml

A policy file is a stream of GPUMigrations and of the Namespaces they apply to:
  apiVersion: v1
  kind: Namespace
  metadata: {name: danlu, labels: {gpu-migrate.io/opt-in: \"true\", gpu-migrate.io/project: danlu}}
  ---
  apiVersion: gpu-migrate.io/v1alpha1
  kind: GPUMigration
  metadata: {name: danlu}
  spec:
    project: danlu
    mode: Enforce
    convert: {coresPerCard: 100, blocksPerCard: 42}

Exit status: 0 all could be planned, 1 some input could not be read (the rest is still planned),
2 wrong command line, 3 at least one object cannot be converted.";

/// Arguments of the commands that only read.
#[derive(Debug, Args)]
#[command(after_help = "Offline:
  kubectl get nodes,pods,namespaces,resourcequotas,daemonsets,gpushadows,gpumigrations,mutatingwebhookconfigurations -A -o yaml > cluster.yaml
  gpu-migrate preflight --from cluster.yaml")]
pub struct LookArgs {
    /// Which cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// What to print.
    #[arg(short = 'o', long, value_enum, default_value_t, help_heading = "Output")]
    pub output: Output,
}

/// Arguments of `verify`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  gpu-migrate verify\n  gpu-migrate verify --install"
)]
pub struct VerifyArgs {
    /// Something else than the whole cluster.
    #[command(subcommand)]
    pub what: Option<VerifyCommand>,
    /// Check the installation instead: definitions, Deployments, the webhook by a pod that is not created, the scheduler, node agents.
    ///
    /// The webhook is called by the API server, through its Service. Ends with go or no-go (exit status 3).
    #[arg(long, conflicts_with = "from")]
    pub install: bool,
    /// Namespace of the installation, with --install.
    #[arg(short = 'n', long, value_name = "NAME", default_value = "gpu-migrate-system", requires = "install", add = complete::namespaces())]
    pub namespace: String,
    /// Which cluster, and the form of the answer.
    #[command(flatten)]
    pub look: LookArgs,
}

/// What else than the whole cluster is verified.
#[derive(Debug, Subcommand)]
pub enum VerifyCommand {
    /// Measure how much memory of a card programs get in this container; needs no cluster.
    ///
    /// Starts CUDA programs that allocate until they are refused, by each way that CUDA has, in one and in several processes, after a killed
    /// process, a fork and an exec. They take a little more than --blocks at most, of the first card that they see: run it in a container that has a
    /// share, best by the Job that --job prints, on a card that nothing else uses. More than the limit, or less than before, is a no (exit status 3).
    Isolation(IsolationArgs),
}

/// Arguments of `verify isolation`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  gpu-migrate verify isolation --job --node gpu-07 --isolation hami-core | kubectl apply -f -
  kubectl wait --for=condition=complete --timeout=5m job/gpu-migrate-verify-isolation
  kubectl logs job/gpu-migrate-verify-isolation
  gpu-migrate verify isolation --blocks 4 -o json > gpu-07.json
  gpu-migrate verify isolation --table gpu-07.json gpu-08.json")]
pub struct IsolationArgs {
    /// Memory that the container was promised, in blocks of 256 MiB.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub blocks: u32,
    /// What limits the container, for the report.
    #[arg(long, value_name = "NAME", default_value = "not named")]
    pub isolation: String,
    /// Also measure with the CUDA bindings (cuda-bindings) of this Python; can be repeated.
    #[arg(long, value_name = "PROGRAM")]
    pub python: Vec<PathBuf>,
    /// Print these reports (of -o json or yaml) as one Markdown table; nothing is measured.
    #[arg(long, value_name = "REPORT", num_args = 1.., conflicts_with_all = ["job", "python", "blocks", "isolation"])]
    pub table: Vec<PathBuf>,
    /// Print a Job that measures in a share of a card; nothing is measured here.
    #[arg(long, conflicts_with = "python")]
    pub job: bool,
    /// The Job's node.
    #[arg(long, value_name = "NAME", requires = "job", help_heading = "Job")]
    pub node: Option<String>,
    /// The Job's cores, hundredths of a card.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..100), requires = "job", help_heading = "Job")]
    pub cores: u32,
    /// The Job's namespace.
    #[arg(
        short = 'n',
        long,
        value_name = "NAME",
        default_value = "default",
        requires = "job",
        help_heading = "Job"
    )]
    pub namespace: String,
    /// The Job's image.
    #[arg(long, default_value = concat!("ghcr.io/gpu-migrate/gpu-migrate:", env!("CARGO_PKG_VERSION")), requires = "job", help_heading = "Job")]
    pub image: String,
    /// The Job's RuntimeClass, where pods with cards need one.
    #[arg(long, value_name = "NAME", requires = "job", help_heading = "Job")]
    pub runtime_class: Option<String>,
    /// What to print, also in the Job.
    #[arg(short = 'o', long, value_enum, default_value_t, help_heading = "Output")]
    pub output: Output,
}

/// Arguments of `status`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  gpu-migrate status\n  gpu-migrate status gpu-07 --holders\n  gpu-migrate status -o wide --no-headers\n  gpu-migrate status --watch"
)]
pub struct StatusArgs {
    /// Only this node.
    #[arg(value_name = "NODE", add = complete::nodes())]
    pub node: Option<String>,
    /// Also list who holds each card.
    #[arg(long)]
    pub holders: bool,
    /// Show it again as it changes, until q or Ctrl-C; into a pipe, whole and only when something has changed.
    #[arg(short = 'w', long, conflicts_with = "from")]
    pub watch: bool,
    /// No titles above the columns, and no legend.
    #[arg(long, help_heading = "Output")]
    pub no_headers: bool,
    /// Which cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// What to print.
    #[arg(short = 'o', long, value_enum, default_value_t, help_heading = "Output")]
    pub output: StatusOutput,
}

/// Forms of a status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum StatusOutput {
    /// A line for each node; of more than forty nodes sums by model, and the nodes to look at.
    #[default]
    Table,
    /// A line for each node, however many.
    Wide,
    /// Names of the nodes that report cards, for `kubectl get`.
    Name,
    /// JSON.
    Json,
    /// YAML.
    Yaml,
}

/// What a line of `top` is about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum TopBy {
    /// A container.
    #[default]
    Container,
    /// A project: all containers of its pods.
    Project,
}

/// The order of `top`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum TopSort {
    /// Most cores requested.
    #[default]
    Cores,
    /// Most of the cards kept busy.
    Used,
    /// Most memory of the cards used.
    Memory,
    /// Most cores requested and not kept busy: who could be given less.
    Unused,
}

/// Arguments of `top`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  gpu-migrate top\n  gpu-migrate top --by project\n  gpu-migrate top --once --sort unused --limit 50\n  gpu-migrate top -n danlu --filter gpu-07\n  gpu-migrate top -o json\n  gpu-migrate top --record use.jsonl --interval 60\n\nKeys:\n  q, Escape       quit\n  ↑ ↓ PgUp PgDn   scroll\n  s               sort by the next of --sort\n  p               by pod or by project\n  /               show what contains a text"
)]
pub struct TopArgs {
    /// What a line of the second table is.
    #[arg(long, value_enum, default_value_t)]
    pub by: TopBy,
    /// What comes first in it.
    #[arg(long, value_enum, default_value_t)]
    pub sort: TopSort,
    /// Seconds between two refreshes [default: 2; with --record: 30].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval: Option<u64>,
    /// Print once and exit; the default for pipes and files, but not with --record.
    #[arg(long)]
    pub once: bool,
    /// Append what each container uses to this file at each refresh, for `suggest`: JSON, a line for each container on each of its cards.
    ///
    /// Without a terminal it prints nothing and goes on until SIGINT or SIGTERM, also while the API server does not answer. An hour of
    /// a hundred containers is 5 MB, with the default interval.
    #[arg(long, value_name = "FILE", conflicts_with = "from")]
    pub record: Option<PathBuf>,
    /// Maximum number of pods to list.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub limit: usize,
    /// Only pods of this namespace; the table of nodes shows all.
    #[arg(short = 'n', long, value_name = "NAME", add = complete::namespaces())]
    pub namespace: Option<String>,
    /// Only pods with this text in their name, container, node or project.
    #[arg(long, value_name = "TEXT")]
    pub filter: Option<String>,
    /// No titles above the columns.
    #[arg(long, help_heading = "Output")]
    pub no_headers: bool,
    /// Which cluster, and the form of the answer.
    #[command(flatten)]
    pub look: LookArgs,
}

/// Arguments of `suggest`.
#[derive(Debug, Args)]
#[command(after_long_help = SUGGEST_HELP)]
pub struct SuggestArgs {
    /// Recordings of `gpu-migrate top --record FILE`; `-` is stdin.
    #[arg(long, value_name = "FILE", num_args = 1.., required_unless_present = "prometheus", conflicts_with = "prometheus", help_heading = "What was used")]
    pub recording: Vec<PathBuf>,
    /// A Prometheus that scrapes the node agents: `http://…` or `https://…`, without `/api/v1`.
    #[arg(long, value_name = "URL", help_heading = "What was used")]
    pub prometheus: Option<String>,
    /// Bearer token for that Prometheus; it is not sent over plain http.
    #[arg(long, value_name = "FILE", conflicts_with = "recording", help_heading = "What was used")]
    pub token_file: Option<PathBuf>,
    /// CAs of that Prometheus, PEM; default: those of the system.
    #[arg(long, value_name = "FILE", conflicts_with = "recording", help_heading = "What was used")]
    pub ca_file: Option<PathBuf>,
    /// How far back Prometheus is asked: a number and m, h, d or w. A recording is read to its end.
    #[arg(
        long,
        value_name = "TIME",
        default_value = "7d",
        conflicts_with = "recording",
        help_heading = "What was used"
    )]
    pub window: Window,
    /// Only pods of this namespace.
    #[arg(short = 'n', long, value_name = "NAME", add = complete::namespaces())]
    pub namespace: Option<String>,
    /// Percent that is added to the p95 of the cores, before it is rounded up to 5 cores.
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1000), help_heading = "How much is proposed")]
    pub cores_margin: u32,
    /// Percent that is added to the greatest memory, before it is rounded up to a block of 256 MiB.
    #[arg(long, value_name = "PERCENT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=1000), help_heading = "How much is proposed")]
    pub memory_margin: u32,
    /// Nothing is proposed for a container of which fewer samples are known.
    #[arg(long, value_name = "N", default_value_t = 100, help_heading = "How much is proposed")]
    pub min_samples: u64,
    /// Nothing is proposed for a container that was seen for less than this time: a number and m, h, d or w.
    #[arg(long, value_name = "TIME", default_value = "24h", help_heading = "How much is proposed")]
    pub min_span: Window,
    /// Where policies, namespaces and pods are.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// No titles above the columns, and no legend.
    #[arg(long, help_heading = "Output")]
    pub no_headers: bool,
    /// What to print.
    #[arg(short = 'o', long, value_enum, default_value_t, help_heading = "Output")]
    pub output: SuggestOutput,
}

/// Forms of a suggestion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum SuggestOutput {
    /// What was seen as a table, then a diff of every policy that would change.
    #[default]
    Diff,
    /// What was seen, and the ratios.
    Table,
    /// Everything, for programs.
    Json,
    /// The policies as proposed, and the labels of their namespaces: a policy file for `simulate` and `plan`.
    Yaml,
}

const SUGGEST_HELP: &str = "\
Examples:
  # Record for some days, on any machine that reaches the cluster; then look
  nohup gpu-migrate top --record use.jsonl --interval 60 &
  gpu-migrate suggest --recording use.jsonl

  # From Prometheus, two weeks back, one namespace
  gpu-migrate suggest --prometheus http://127.0.0.1:9090 --window 14d -n danlu

  # How many cards would it free? How would the manifests change?
  gpu-migrate suggest --recording use.jsonl -o yaml > proposed.yaml
  kubectl get nodes,pods -A -o json | gpu-migrate simulate --snapshot - --policy-file proposed.yaml
  gpu-migrate plan --policy proposed.yaml -f examples/

  # Without a cluster: policies and Namespaces of a file
  gpu-migrate suggest --recording use.jsonl --from policies.yaml

  # After one hour, with half as much again for memory
  gpu-migrate suggest --recording use.jsonl --min-span 1h --memory-margin 50

The rule, for each project and container name, over all its pods and cards:
  cores   p95 of the pod that uses most, plus --cores-margin, rounded up to 5; not less than a share that was often at its limit
  memory  most that any pod used of a card, plus --memory-margin, rounded up to whole blocks of 256 MiB
A container with several cards, with parts of cards, with too few samples or with a ratio by card product gets no proposal, and the
reason is said. A project without a policy gets one in mode Audit.

Exit status: 0 something could be judged, 1 nothing was recorded or something could not be read, 2 wrong command line,
3 of no container enough is known.";

/// How a command changes a cluster.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ChangeArgs {
    /// Do not ask before the change; it is only asked on a terminal.
    #[arg(short = 'y', long)]
    pub yes: bool,
    /// Change nothing: the API server checks the change and forgets it.
    #[arg(long)]
    pub dry_run: bool,
}

/// Arguments of `rollout`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  gpu-migrate rollout start danlu
  gpu-migrate rollout undo danlu --dry-run
  gpu-migrate rollout undo danlu
  gpu-migrate rollout undo --now danlu")]
pub struct RolloutArgs {
    /// What to do.
    #[arg(value_enum)]
    pub action: RolloutAction,
    /// Name of the GPUMigration.
    #[arg(value_name = "POLICY", add = complete::policies())]
    pub policy: String,
    /// With undo: all workloads at once, without waiting for one before the next.
    #[arg(long)]
    pub now: bool,
    /// How to change it.
    #[command(flatten)]
    pub change: ChangeArgs,
    /// Which cluster.
    #[command(flatten)]
    pub reach: ReachArgs,
    /// What to print.
    #[arg(short = 'o', long, value_enum, default_value_t, help_heading = "Output")]
    pub output: ObjectOutput,
}

/// What to do with a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RolloutAction {
    /// Enforce the policy; the operator starts the first wave.
    Start,
    /// Restart no further workload; converted ones stay.
    Pause,
    /// Continue.
    Resume,
    /// Roll every workload back to whole cards.
    Undo,
}

/// Arguments of `quota`.
#[derive(Debug, Args)]
pub struct QuotaArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: QuotaCommand,
}

/// What to do with quotas.
#[derive(Debug, Subcommand)]
pub enum QuotaCommand {
    /// Print limits on shares that correspond to the limits on whole cards, for `kubectl apply --server-side`.
    ///
    /// The limit on whole cards stays: during the migration a project has both kinds of pods, and may have as many of each.
    /// Kueue counts a workload as written: cover nvidia.com/gpu there, or use its resource transformations.
    Translate(TranslateArgs),
}

/// Arguments of `quota translate`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  gpu-migrate quota translate
  gpu-migrate quota translate -n danlu | kubectl apply --server-side -f -
  gpu-migrate quota translate --apply")]
pub struct TranslateArgs {
    /// Only this namespace; default: all that are opted in.
    #[arg(short = 'n', long, value_name = "NAME", add = complete::namespaces())]
    pub namespace: Option<String>,
    /// Apply them to the cluster.
    #[arg(long, conflicts_with = "from")]
    pub apply: bool,
    /// No titles above the columns of -o table.
    #[arg(long, help_heading = "Output")]
    pub no_headers: bool,
    /// How to change it, with --apply.
    #[command(flatten)]
    pub change: ChangeArgs,
    /// Which cluster.
    #[command(flatten)]
    pub cluster: ClusterArgs,
    /// Output format.
    #[arg(short = 'o', long, value_enum, default_value_t = ObjectOutput::Yaml, help_heading = "Output")]
    pub output: ObjectOutput,
}

/// Arguments of `cordon-card`.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  gpu-migrate cordon-card gpu-07 3\n  gpu-migrate cordon-card gpu-07 3 --undo"
)]
pub struct CordonArgs {
    /// The node.
    #[arg(value_name = "NODE", add = complete::nodes())]
    pub node: String,
    /// Cards by index or UUID.
    #[arg(value_name = "CARD", required = true)]
    pub cards: Vec<String>,
    /// Allow new allocations again.
    #[arg(long)]
    pub undo: bool,
    /// How to change it.
    #[command(flatten)]
    pub change: ChangeArgs,
    /// Which cluster.
    #[command(flatten)]
    pub reach: ReachArgs,
    /// What to print.
    #[arg(short = 'o', long, value_enum, default_value_t, help_heading = "Output")]
    pub output: ObjectOutput,
}

/// Arguments of `uninstall`.
#[derive(Debug, Args)]
pub struct UninstallArgs {
    /// How to change it.
    #[command(flatten)]
    pub change: ChangeArgs,
    /// Even while shared pods run, or NVIDIA's plugin is still behind the node agent.
    #[arg(long)]
    pub force: bool,
    /// Only say what is in the way (exit status 3), or that nothing is.
    #[arg(long, conflicts_with_all = ["force", "yes", "dry_run"])]
    pub check: bool,
    /// Keep the CustomResourceDefinitions, and with them the policies.
    #[arg(long)]
    pub keep_policies: bool,
    /// Namespace of the installation.
    #[arg(short = 'n', long, value_name = "NAME", default_value = "gpu-migrate-system", add = complete::namespaces())]
    pub namespace: String,
    /// Which cluster.
    #[command(flatten)]
    pub reach: ReachArgs,
    /// What to print.
    #[arg(short = 'o', long, value_enum, default_value_t, help_heading = "Output")]
    pub output: Output,
}

/// Arguments of `crds`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  gpu-migrate crds | kubectl apply --server-side -f -")]
pub struct CrdsArgs {
    /// Write one file per resource into this folder instead of printing.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Arguments of `completion`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  source <(gpu-migrate completion bash)
  source <(gpu-migrate completion zsh)
  gpu-migrate completion fish > ~/.config/fish/completions/gpu-migrate.fish
  gpu-migrate completion powershell | Out-String | Invoke-Expression")]
pub struct CompletionArgs {
    /// The shell.
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// Arguments of `man`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  gpu-migrate man ~/.local/share/man/man1 && man gpu-migrate-plan")]
pub struct ManArgs {
    /// The folder; created if it does not exist.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// The command as clap knows it, named as it was called: a kubectl plugin speaks of `kubectl gpu-migrate`.
///
/// kubectl finds a plugin by its file name, where `-` separates subcommands and `_` stands for `-`:
/// a link named `kubectl-gpu_migrate` to this program makes it one.
#[must_use]
pub fn command(argv0: Option<&OsStr>) -> clap::Command {
    let as_plugin =
        argv0.and_then(|path| Path::new(path).file_stem()).is_some_and(|name| name == "kubectl-gpu_migrate");
    let mut command = Cli::command();
    if as_plugin {
        command = command.bin_name("kubectl gpu-migrate").display_name("kubectl gpu-migrate");
    }
    command
}

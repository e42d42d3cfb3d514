//! The arguments of `simulate`, and the help that teaches it.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use gpu_migrate_model::score::ScoringStrategy;

use crate::trace::replay::{MixSource, PlainPods, Policy};

/// Arguments of `gpu-migrate simulate`.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct SimulateArgs {
    /// Nodes and pods of a cluster: the output of `kubectl get nodes,pods -A -o json`; `-` is stdin.
    #[arg(long, value_name = "FILE", required_unless_present = "trace_nodes", conflicts_with_all = ["trace_nodes", "trace_pods"])]
    pub snapshot: Option<PathBuf>,

    /// A file with the policies to try, and the Namespaces whose labels matter. They are tried in full force, whatever their mode and
    /// rollout.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["cores", "blocks"], help_heading = "Snapshot of a cluster")]
    pub policy_file: Option<PathBuf>,
    /// Cores for one card, 100 is all of it: ratios to try on every pod.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 50, 33, 25, 20, 10], value_parser = clap::value_parser!(u32).range(1..=100), value_name = "LIST", help_heading = "Snapshot of a cluster")]
    pub cores: Vec<u32>,
    /// Blocks of 256 MiB for one card; by default the same part of a card's memory as of its cores.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..), value_name = "N", help_heading = "Snapshot of a cluster")]
    pub blocks: Option<u32>,
    /// Which of the nodes and cards that fit is best, as the extender's `--scoring`.
    #[arg(
        long,
        value_enum,
        default_value_t,
        value_name = "STRATEGY",
        help_heading = "Snapshot of a cluster"
    )]
    pub scoring: ScoringStrategy,

    /// Nodes of a trace, CSV: sn, cpu_milli, memory_mib, gpu, model.
    #[arg(long, value_name = "FILE", requires = "trace_pods", help_heading = "Replay of a trace")]
    pub trace_nodes: Option<PathBuf>,
    /// Pods of a trace, CSV: name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec.
    #[arg(long, value_name = "FILE", requires = "trace_nodes", help_heading = "Replay of a trace")]
    pub trace_pods: Option<PathBuf>,
    /// Policies to compare; all of them by default.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME", help_heading = "Replay of a trace")]
    pub policy: Vec<Policy>,
    /// Seeds of the order of arrival: `42-51`, or `1,2,3`.
    #[arg(long, default_value = "42-51", value_name = "LIST", help_heading = "Replay of a trace")]
    pub seeds: Seeds,
    /// Pods arrive until they ask for so much of the cluster's cards; 1.3 is 130 %.
    #[arg(long, default_value_t = 1.3, value_parser = ratio, value_name = "PART", help_heading = "Replay of a trace")]
    pub ratio: f64,
    /// From where policies know which requests usually come.
    #[arg(long, value_enum, default_value_t, help_heading = "Replay of a trace")]
    pub mix: MixSource,
    /// Where pods go that ask for no card.
    #[arg(long, value_enum, default_value_t, help_heading = "Replay of a trace")]
    pub plain_pods: PlainPods,
    /// Replays at a time; as many as there are processors by default.
    #[arg(long, value_name = "N", help_heading = "Replay of a trace")]
    pub threads: Option<usize>,
    /// Draw allocation and fragmentation over arrival into this folder, as SVG.
    #[arg(long, value_name = "DIR", help_heading = "Replay of a trace")]
    pub plot: Option<PathBuf>,

    /// What to print.
    #[arg(short = 'o', long, value_enum, default_value_t, help_heading = "Output")]
    pub output: Output,
}

/// Forms of the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table.
    #[default]
    Table,
    /// Everything, for programs.
    Json,
    /// Rows of numbers.
    Csv,
    /// A page with plots that needs no network, for a browser.
    Html,
}

/// Seeds of a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seeds(pub Vec<u64>);

/// Why a list of seeds cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?}: expected numbers and ranges such as 42-51 or 1,2,3, and 1000 seeds at most")]
pub struct SeedsError(String);

impl FromStr for Seeds {
    type Err = SeedsError;

    fn from_str(text: &str) -> Result<Self, SeedsError> {
        let wrong = || SeedsError(text.to_owned());
        let mut seeds = Vec::new();
        for part in text.split(',') {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let from: u64 = from.trim().parse().map_err(|_| wrong())?;
            let to: u64 = to.trim().parse().map_err(|_| wrong())?;
            if from > to || to - from >= 1_000 || seeds.len() >= 1_000 {
                return Err(wrong());
            }
            seeds.extend(from..=to);
        }
        Ok(Self(seeds))
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if ratio > 0.0 && ratio <= 10.0 => Ok(ratio),
        _ => Err("expected a number above 0 and up to 10: 1.3 is 130 % of the cluster's cards".to_owned()),
    }
}

impl SimulateArgs {
    /// The policies to compare, in a fixed order, each once.
    #[must_use]
    pub fn policies(&self) -> Vec<Policy> {
        let asked = |policy: &&Policy| self.policy.is_empty() || self.policy.contains(policy);
        Policy::value_variants().iter().filter(asked).copied().collect()
    }

    /// Replays at a time.
    #[must_use]
    pub fn threads(&self) -> usize {
        let all = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.threads.filter(|threads| *threads > 0).unwrap_or_else(all)
    }
}

const EXAMPLES: &str = "\
Examples:
  # What would moving every GPU pod of this cluster give, at several ratios?
  kubectl get nodes,pods -A -o json | gpu-migrate simulate --snapshot -

  # At half a card and 21 blocks each; or by the policies that are to come
  gpu-migrate simulate --snapshot cluster.json --cores 50 --blocks 21
  gpu-migrate simulate --snapshot cluster.json --policy-file policies.yaml
  gpu-migrate simulate --snapshot cluster.json -o html > report.html

  # Replay the experiment of the FGD paper on its trace: five policies, ten seeds, with plots
  gpu-migrate simulate --trace-nodes openb_node_list_gpu_node.csv \\
      --trace-pods openb_pod_list_default.csv --plot plots/

  # As a cluster really is: the extender does not place pods without cards, and must learn what usually comes
  gpu-migrate simulate --trace-nodes nodes.csv --trace-pods pods.csv --plain-pods spread --mix observed

Policies:
  random      any node and card that fits
  best-fit    least CPU and GPU left afterwards
  binpack     least GPU left before; gpu-admission's
  fgd         fragmentation gradient descent (USENIX ATC '23), as published
  lookahead   least loss of what the usual requests could still use: the extender's default";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_ranges_and_lists() {
        assert_eq!("42-44,7".parse(), Ok(Seeds(vec![42, 43, 44, 7])));
        for wrong in ["", "a", "5-3", "1-100000", "1,,2", "-1"] {
            assert!(wrong.parse::<Seeds>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        #[derive(clap::Parser)]
        struct Program {
            #[command(flatten)]
            args: SimulateArgs,
        }
        use clap::{CommandFactory as _, Parser as _};
        Program::command().debug_assert();
        let parse = |line: &str| Program::try_parse_from(line.split(' ')).map(|program| program.args);
        assert!(parse("x").is_err());
        assert!(parse("x --trace-nodes n").is_err());
        assert!(parse("x --snapshot s --trace-nodes n --trace-pods p").is_err());
        assert!(parse("x --trace-nodes n --trace-pods p --ratio 0").is_err());
        let args = parse("x --trace-nodes n --trace-pods p --policy lookahead,random").unwrap();
        assert_eq!(args.policies(), [Policy::Random, Policy::Lookahead]);
    }
}

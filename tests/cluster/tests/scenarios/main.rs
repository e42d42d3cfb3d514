//! The scenarios: each a test in cargo's usual form, all on one cluster, one after the other.
//!
//! `GPU_MIGRATE_CLUSTER=1 cargo test -p gpu-migrate-cluster-tests [NAME]` runs them (root; Debian packages `containerd`,
//! `runc`, `etcd-server`). Without the variable each says that it is skipped, and why. Those in
//! [`ON_PURPOSE`] want a variable of their own as well.

mod admission;
mod churn;
mod health;
mod kubernetes;
mod leaders;
mod migration;
mod nodes;
mod path;
mod placement;
mod refused;
mod resources;
mod rights;

use std::{sync::Arc, time::Instant};

use anyhow::{Context, Result};
use futures::future::LocalBoxFuture;
use gpu_migrate_cluster_tests::{Cluster, Stage, binaries, diagnose};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use tokio::{runtime::Runtime, sync::Mutex};

/// A scenario, and the stage it runs on.
struct Scenario {
    name: &'static str,
    stage: Stage,
    run: for<'a> fn(&'a mut Cluster) -> LocalBoxFuture<'a, Result<()>>,
}

/// Names a scenario's function and boxes its future.
macro_rules! scenario {
    ($stage:ident, $module:ident :: $name:ident) => {
        Scenario {
            name: concat!(stringify!($module), "::", stringify!($name)),
            stage: Stage::$stage,
            run: |cluster| Box::pin($module::$name(cluster)),
        }
    };
}

fn scenarios() -> Vec<Scenario> {
    vec![
        // First: what it compares with is a cluster that nobody has touched.
        scenario!(Bare, migration::from_install_to_uninstall),
        scenario!(Legacy, kubernetes::a_legacy_pod_gets_a_card_of_nvidias_plugin),
        scenario!(Legacy, kubernetes::the_observer_sees_a_pod_that_helps_itself),
        scenario!(Legacy, kubernetes::a_binding_carries_annotations_into_the_pod),
        scenario!(Legacy, kubernetes::the_checkpoint_keeps_entries_of_deleted_pods),
        scenario!(Legacy, resources::sense_is_accepted_and_nonsense_is_refused),
        scenario!(Bridged, resources::what_we_ship_is_accepted),
        scenario!(Bridged, path::a_namespace_that_is_not_opted_in_is_untouched),
        scenario!(Bridged, path::a_deployment_becomes_shared_pods_on_the_chosen_cards),
        scenario!(Bridged, path::shared_pods_keep_off_legacy_cards_and_wake_when_one_is_freed),
        scenario!(Bridged, path::legacy_pods_keep_off_shared_cards),
        scenario!(Bridged, path::a_deleted_legacy_pods_card_is_shared_next),
        scenario!(Bridged, path::restarts_move_no_card),
        scenario!(Bridged, health::a_sick_card_gets_nobody_new_until_it_is_well),
        scenario!(Bridged, refused::a_pod_that_fits_on_no_card_is_refused_and_cleared_away),
        scenario!(Bridged, admission::a_server_side_dry_run_shows_the_conversion),
        scenario!(Bridged, admission::pods_of_every_workload_kind_are_converted),
        scenario!(Bridged, admission::without_the_webhook_pods_stay_legacy),
        scenario!(Bridged, admission::rotations_fail_no_call),
        scenario!(Bridged, placement::random_pods_overcommit_no_card),
        scenario!(Bridged, placement::a_higher_class_preempts_one_card_only),
        scenario!(Bridged, placement::a_gang_is_bound_together_or_not_at_all),
        scenario!(Bridged, placement::a_gang_that_runs_out_of_time_is_told_in_one_event),
        scenario!(Bridged, placement::gates_of_a_gang_are_lifted_together),
        scenario!(Bridged, placement::rival_gangs_finish_one_after_the_other),
        scenario!(Bridged, placement::a_bind_that_outlives_its_caller_is_placed_once),
        scenario!(Bridged, placement::a_killed_leader_loses_no_pod),
        scenario!(Bridged, nodes::plugins_come_after_the_driver_and_go_with_the_last_node),
        scenario!(Bridged, leaders::killed_and_frozen_leaders_restart_nothing_twice),
        scenario!(Bridged, churn::kills_at_random_break_no_invariant),
        // Last: it looks at what all the others asked for.
        scenario!(Bridged, rights::no_verb_is_unused),
    ]
}

/// Scenarios that are run on purpose only, and stay strict: the beginning of their names, the variable that asks for them, and
/// why.
const ON_PURPOSE: [(&str, &str, &str); 1] = [(
    "churn::",
    "GPU_MIGRATE_CHURN",
    "clean in all three runs since the observer tells ending processes apart, but CI has not run it yet",
)];

/// The cluster that all scenarios share.
enum Shared {
    NotStarted,
    Running(Box<Cluster>),
    /// Did not come up: it is not tried again for every scenario.
    Broken(String),
}

fn main() -> Result<()> {
    let mut arguments = Arguments::from_args();
    // One cluster, so one scenario at a time; and on the main thread, which components must be started from.
    arguments.test_threads = Some(1);
    let runtime = Arc::new(Runtime::new().context("cannot start tokio")?);
    let shared = Arc::new(Mutex::new(Shared::NotStarted));
    let whole = arguments.filter.is_none() && arguments.skip.is_empty();
    let trials = scenarios()
        .into_iter()
        .map(|scenario| {
            let (runtime, shared) = (runtime.clone(), shared.clone());
            Trial::ignorable_test(scenario.name, move || {
                if scenario.name.starts_with("rights::") && !whole {
                    return Ok(Completion::ignored_with("looks at what all scenarios did: run them all"));
                }
                runtime.block_on(run(&scenario, &shared))
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    // `exit` runs no destructor.
    runtime.block_on(async { *shared.lock().await = Shared::NotStarted });
    conclusion.exit()
}

async fn run(scenario: &Scenario, shared: &Mutex<Shared>) -> Result<Completion, Failed> {
    if !binaries::asked_for().map_err(failed)? {
        return Ok(Completion::ignored_with("needs root and a machine to itself: set GPU_MIGRATE_CLUSTER=1"));
    }
    for (prefix, variable, why) in ON_PURPOSE {
        if scenario.name.starts_with(prefix) && std::env::var(variable).as_deref() != Ok("1") {
            return Ok(Completion::ignored_with(format!("{why}: set {variable}=1")));
        }
    }
    let mut shared = shared.lock().await;
    if let Shared::NotStarted = *shared {
        *shared = match Cluster::start().await {
            Ok(cluster) => Shared::Running(Box::new(cluster)),
            Err(error) => Shared::Broken(format!("{error:#}")),
        };
    }
    let cluster = match &mut *shared {
        Shared::Running(cluster) => cluster,
        Shared::Broken(error) => return Err(format!("the cluster did not start: {error}").into()),
        Shared::NotStarted => return Err("the cluster is not started".into()),
    };
    let begin = Instant::now();
    let mut outcome = async {
        cluster.enter(scenario.stage).await?;
        (scenario.run)(cluster).await?;
        cluster.check_rights()?;
        cluster.check()
    }
    .await;
    if let Err(error) = outcome {
        outcome = Err(error.context(diagnose::dump(cluster).await));
        cluster.distrust();
    }
    let took = begin.elapsed();
    let tidied = cluster.tidy().await.context("cannot tidy up after the scenario");
    eprintln!("  {} took {took:.1?}, and {:.1?} to tidy up", scenario.name, begin.elapsed() - took);
    outcome.and(tidied).map_err(failed)?;
    Ok(Completion::Completed)
}

fn failed(error: anyhow::Error) -> Failed {
    // The context is the long dump: first what happened, then that.
    let chain: Vec<String> = error.chain().map(ToString::to_string).collect();
    chain.into_iter().rev().collect::<Vec<_>>().join("\n").into()
}

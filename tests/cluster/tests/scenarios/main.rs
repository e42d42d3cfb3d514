//! The scenarios: each a test in cargo's usual form, all on one cluster, one after the other.
//!
//! `GPU_MIGRATE_CLUSTER=1 cargo test -p gpu-migrate-cluster-tests [NAME]` runs them (root; Debian packages `runc`,
//! `etcd-server`). Without the variable each reports that it is skipped, and why; the churn needs `GPU_MIGRATE_CHURN=1`
//! as well.
//!
//! Two cores are little for a cluster, and 59 scenarios are many: where `GPU_MIGRATE_SECOND_TRIES` names a file, as in CI, a scenario
//! that failed is run once more on a new cluster, and one that then passes is appended to that file with the reason of its failure.
//! A violated invariant is never tried again, and no more than two scenarios of a run are.

mod admission;
mod churn;
mod dra;
mod evidence;
mod health;
mod hostile;
mod isolations;
mod kubernetes;
mod leaders;
mod migration;
mod monitoring;
mod nodes;
mod path;
mod percent;
mod placement;
mod pods;
mod rbac;
mod reboot;
mod registration;
mod rejected;
mod resources;
mod scheduling;
mod tokens;
mod tracing;
mod two_nodes;
mod usage;
mod waves;

use std::{
    fs::{self, File},
    io::Write as _,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use futures::future::LocalBoxFuture;
use gpu_migrate_cluster_tests::{Cluster, Stage, binaries, diagnose, observe::take_violated};
use gpu_migrate_tests::skipped_test;
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
        scenario!(Bare, pods::the_packaged_chart_runs_every_component_in_its_pod),
        // It compares with a new cluster.
        scenario!(Bare, migration::from_install_to_uninstall),
        scenario!(Legacy, kubernetes::a_legacy_pod_gets_a_card_of_nvidias_plugin),
        scenario!(Legacy, kubernetes::the_observer_reports_a_pod_that_sets_its_own_cards),
        scenario!(Legacy, kubernetes::events_are_selected_by_who_reports_them),
        scenario!(Legacy, kubernetes::a_binding_carries_annotations_into_the_pod),
        scenario!(Legacy, kubernetes::the_checkpoint_keeps_entries_of_deleted_pods),
        scenario!(Legacy, resources::valid_objects_are_accepted_and_invalid_ones_rejected),
        scenario!(Legacy, resources::a_command_survives_whoever_applies_the_policy_again),
        // It leaves that stage.
        scenario!(Legacy, two_nodes::one_node_is_bridged_and_taken_back_and_the_other_never_changes),
        scenario!(Bridged, resources::shipped_manifests_are_accepted),
        scenario!(Bridged, path::a_namespace_that_is_not_opted_in_is_untouched),
        scenario!(Bridged, path::a_deployment_becomes_shared_pods_on_the_chosen_cards),
        scenario!(Bridged, path::shared_pods_avoid_legacy_cards_and_start_when_one_is_freed),
        scenario!(Bridged, path::legacy_pods_avoid_shared_cards),
        scenario!(Bridged, path::the_card_of_a_deleted_legacy_pod_is_reused_for_a_share),
        scenario!(Bridged, path::restarts_change_no_holder),
        scenario!(Bridged, evidence::a_lost_checkpoint_frees_no_card),
        scenario!(Bridged, evidence::a_card_is_its_processes_until_they_end_whoever_deletes_their_pod),
        scenario!(Bridged, reboot::a_reboot_without_a_card_leaves_the_others_as_they_were),
        scenario!(Bridged, dra::a_claimed_card_takes_nothing_else),
        scenario!(Bridged, registration::a_plugin_at_the_kubelet_is_registered_over),
        scenario!(Bridged, health::an_unhealthy_card_gets_no_new_pod_until_it_is_healthy),
        scenario!(Bridged, health::a_card_that_hangs_or_is_split_costs_no_other_card),
        scenario!(Bridged, isolations::a_container_sees_what_its_isolation_promises),
        scenario!(Bridged, usage::what_a_process_uses_is_its_containers),
        scenario!(Bridged, tracing::a_collector_gets_one_trace_of_each_pod),
        scenario!(Bridged, monitoring::each_query_returns_series_and_no_alert_fires_without_a_cause),
        scenario!(Bridged, rejected::a_pod_that_fits_on_no_card_is_rejected_and_deleted),
        scenario!(Bridged, admission::a_server_side_dry_run_shows_the_conversion),
        scenario!(Bridged, admission::pods_of_every_workload_kind_are_converted),
        scenario!(Bridged, admission::without_the_webhook_pods_stay_legacy),
        scenario!(Bridged, admission::rotations_fail_no_call),
        scenario!(Bridged, admission::an_upgrade_with_other_arguments_writes_few_times),
        scenario!(Bridged, percent::half_of_a_project_stays_the_same_half),
        scenario!(Bridged, hostile::clients_without_credentials_keep_no_pod_from_being_converted),
        scenario!(Bridged, placement::random_pods_overcommit_no_card),
        scenario!(Bridged, placement::preemption_evicts_the_pods_of_one_card_only),
        scenario!(Bridged, placement::all_members_of_a_gang_are_bound_or_none),
        scenario!(Bridged, placement::a_gang_timeout_is_reported_in_one_event),
        scenario!(Bridged, placement::a_member_without_a_node_keeps_the_others_from_holding_cards),
        scenario!(Bridged, placement::a_gang_has_the_size_of_its_pod_group),
        scenario!(Bridged, placement::scheduling_gates_of_a_gang_are_removed_together),
        scenario!(Bridged, placement::competing_gangs_are_bound_one_after_the_other),
        scenario!(Bridged, placement::a_bind_that_the_scheduler_gave_up_on_is_done_once),
        scenario!(Bridged, placement::a_killed_leader_loses_no_pod),
        scenario!(Bridged, scheduling::preemption_for_cpu_spares_no_victim),
        scenario!(Bridged, scheduling::victims_on_different_cards_are_completed),
        scenario!(Bridged, scheduling::a_freed_card_is_kept_for_the_pod_that_is_nominated),
        scenario!(Bridged, scheduling::a_retried_pod_of_a_job_joins_its_gang),
        scenario!(Bridged, scheduling::a_gang_of_1100_is_bound),
        scenario!(Bridged, scheduling::gated_pods_in_thousands_cause_no_write),
        scenario!(Bridged, scheduling::a_frozen_extender_names_no_card_after_its_successor),
        scenario!(Bridged, nodes::plugins_are_installed_after_the_driver_and_removed_with_the_last_node),
        scenario!(Bridged, leaders::killed_and_paused_leaders_restart_no_workload_twice),
        scenario!(Bridged, waves::what_goes_wrong_in_a_wave_is_seen_said_and_undone),
        scenario!(Bridged, churn::random_kills_break_no_invariant),
        // After all the others: it checks the requests of their programs.
        scenario!(Bridged, rbac::every_granted_verb_is_used),
        // Its own requests are not of the programs.
        scenario!(Bridged, tokens::a_stolen_token_is_of_use_on_its_own_node_alone),
    ]
}

/// Of a run. More is no accident.
const SECOND_TRIES: usize = 2;

/// For one scenario. Its waits have deadlines of their own; this ends what hangs besides.
const LIMIT: Duration = Duration::from_secs(600);

/// The cluster that all scenarios share.
enum Shared {
    NotStarted,
    Running(Box<Cluster>),
    /// Did not start: it is not retried for every scenario.
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
                if scenario.name.starts_with("rbac::") && !whole {
                    return Ok(skip(scenario.name, "checks what all scenarios did: run them all"));
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
    if !binaries::asked_for().map_err(|error| format!("{error:#}"))? {
        return Ok(skip(scenario.name, "needs root and a machine to itself: set GPU_MIGRATE_CLUSTER=1"));
    }
    if scenario.name.starts_with("churn::") && std::env::var("GPU_MIGRATE_CHURN").as_deref() != Ok("1") {
        return Ok(skip(scenario.name, "takes minutes: set GPU_MIGRATE_CHURN=1"));
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
    run_twice(scenario, cluster).await.map_err(|error| format!("{error:#}").into())
}

async fn run_twice(scenario: &Scenario, cluster: &mut Cluster) -> Result<Completion> {
    take_violated();
    let Err(first) = run_once(scenario, cluster).await else { return Ok(Completion::Completed) };
    let Some(mut file) = second_try()? else { return Err(first) };
    eprintln!("  {}: a second try", scenario.name);
    run_once(scenario, cluster).await?;
    let reason = format!("{first:#}");
    writeln!(file, "{}: {}", scenario.name, reason.lines().next().unwrap_or_default())?;
    Ok(Completion::Completed)
}

/// The file of those that passed at their second try, where this one may be tried again.
fn second_try() -> Result<Option<File>> {
    let Some(path) = std::env::var_os("GPU_MIGRATE_SECOND_TRIES") else { return Ok(None) };
    let before = fs::read_to_string(&path).unwrap_or_default().lines().count();
    if take_violated() || before >= SECOND_TRIES {
        return Ok(None);
    }
    let file = File::options().create(true).append(true).open(&path);
    file.map(Some).with_context(|| format!("cannot open {}", path.to_string_lossy()))
}

async fn run_once(scenario: &Scenario, cluster: &mut Cluster) -> Result<()> {
    let begin = Instant::now();
    let scenario_steps = async {
        cluster.enter(scenario.stage).await?;
        (scenario.run)(cluster).await?;
        cluster.check_forbidden()?;
        cluster.check()
    };
    let outcome = tokio::time::timeout(LIMIT, scenario_steps).await;
    let mut outcome = outcome.unwrap_or_else(|_| Err(anyhow!("not done after {LIMIT:?}")));
    if let Err(error) = &outcome {
        eprintln!("  {} FAILED: {error:#}\n{}", scenario.name, diagnose::dump(cluster).await);
        cluster.mark_unknown();
    }
    let took = begin.elapsed();
    let tidied = cluster.clean_up().await.context("cannot tidy up after the scenario");
    eprintln!("  {} took {took:.1?}, and {:.1?} to tidy up", scenario.name, begin.elapsed() - took);
    if outcome.is_ok()
        && let Err(error) = tidied
    {
        eprintln!("  {} FAILED: {error:#}", scenario.name);
        cluster.mark_unknown();
        outcome = Err(error);
    }
    outcome
}

/// A scenario that does not run here, counted as such.
fn skip(name: &str, why: &str) -> Completion {
    skipped_test(name, why);
    Completion::ignored_with(why)
}

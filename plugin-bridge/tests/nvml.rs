//! The process that calls NVML, over the stand-in for the driver's library: cards that hang, are lost, come, or are switched to MIG.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use gpu_migrate_plugin_bridge::inventory::nvml_process::{
    CardReport, Event, Found, Limits, Message, NvmlProcess, Report,
};
use gpu_migrate_plugin_bridge::usage::owner::Owner;
use tempfile::TempDir;

/// The library, and the folder of its faults, which is read by processes that are started from here.
struct StandIn {
    folder: TempDir,
}

impl StandIn {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/cluster/nvml/nvml.c");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(folder.path().join("nvml.so"))
            .arg(source)
            .status();
        assert!(built.unwrap().success());
        // The environment of a child is not of the parent's: a script carries it.
        let script = format!(
            "#!/bin/sh\nNVML_STAND_IN_CARDS=4 NVML_STAND_IN_STATE={} exec {} \"$@\"\n",
            folder.path().display(),
            env!("CARGO_BIN_EXE_gpu-migrate-bridge")
        );
        // Written by a child: a file that this process has open for writing may be inherited by what another test is starting, and cannot
        // be executed as long as it is open anywhere (ETXTBSY).
        let written = Command::new("sh")
            .args(["-c", r#"printf %s "$2" >"$1" && chmod 755 "$1""#, "sh"])
            .arg(folder.path().join("program"))
            .arg(script)
            .status();
        assert!(written.unwrap().success());
        Self { folder }
    }

    fn fault(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, "").unwrap();
        path
    }

    fn process(&self) -> NvmlProcess {
        self.process_with(Limits::default())
    }

    fn process_with(&self, limits: Limits) -> NvmlProcess {
        NvmlProcess::new(self.folder.path().join("program"), Some(self.folder.path().join("nvml.so")), limits)
    }
}

fn uuid(card: usize) -> String {
    format!("GPU-00000000-0000-4000-8000-{card:012x}")
}

fn uuids(found: &Found) -> Vec<String> {
    found.cards.iter().map(|(_, card)| card.uuid.clone()).collect()
}

/// What is said of the cards until the next round is over.
async fn round(process: &mut NvmlProcess) -> Vec<CardReport> {
    let mut cards = Vec::new();
    loop {
        match process.next().await.unwrap() {
            Report::Said(Message::Card(card)) => cards.push(card),
            Report::Said(Message::Round) => return cards,
            Report::Said(_) => {}
            report => panic!("{report:?}"),
        }
    }
}

#[tokio::test]
async fn a_card_that_hangs_costs_no_other_card() {
    let stand_in = StandIn::new();
    let hang = stand_in.fault("hang-2");
    // Longer than one wait for events.
    let limits = Limits { silence: Duration::from_secs(9), ..Limits::default() };
    let mut process = stand_in.process_with(limits);
    let found = process.first_inventory().await.unwrap();
    assert_eq!(uuids(&found), [uuid(0), uuid(1), uuid(3)]);
    let cards = round(&mut process).await;
    assert!(cards.iter().all(|card| card.fault.is_none()) && cards.len() == 3, "{cards:?}");

    // Another one, while it runs: it is named, and left out by the next process.
    let other = stand_in.fault("hang-0");
    let silent = loop {
        match process.next().await.unwrap() {
            Report::Silent(card) => break card,
            Report::Said(_) => {}
            report => panic!("{report:?}"),
        }
    };
    assert_eq!(silent, Some(0));
    let found = process.first_inventory().await.unwrap();
    assert_eq!(uuids(&found), [uuid(1), uuid(3)]);
    std::fs::remove_file(hang).unwrap();
    std::fs::remove_file(other).unwrap();
}

#[tokio::test]
async fn a_lost_card_costs_no_other_card_and_is_seen_when_it_is_back() {
    let stand_in = StandIn::new();
    let lost = stand_in.fault("lost-1");
    let mut process = stand_in.process();
    let first = process.first_inventory().await.unwrap();
    assert_eq!(uuids(&first), [uuid(0), uuid(2), uuid(3)]);
    std::fs::remove_file(lost).unwrap();
    // The process ends by itself to look again.
    let again = loop {
        match process.next().await.unwrap() {
            Report::Said(Message::Inventory(found)) => break found,
            Report::Silent(card) => panic!("{card:?}"),
            _ => {}
        }
    };
    assert_eq!(again.change_since(&first), Some(format!("{} has come", uuid(1))));
}

#[tokio::test]
async fn a_card_that_refuses_events_costs_no_other_cards_events_and_mig_is_seen_while_it_runs() {
    let stand_in = StandIn::new();
    stand_in.fault("no-events-0");
    let mut process = stand_in.process();
    let first = process.first_inventory().await.unwrap();
    std::fs::write(stand_in.folder.path().join("xid-3"), "79").unwrap();
    loop {
        match process.next().await.unwrap() {
            Report::Said(Message::Event { uuid: of, event }) => {
                assert_eq!((of, event), (Some(uuid(3)), Event::Xid(79)));
                break;
            }
            Report::Said(_) => {}
            report => panic!("{report:?}"),
        }
    }
    stand_in.fault("mig-2");
    stand_in.fault("absent-1");
    let shape = |card: &CardReport| card.shape.clone().unwrap();
    loop {
        let cards = round(&mut process).await;
        let changed: Vec<&CardReport> = cards.iter().filter(|card| shape(card).mig).collect();
        if let [card] = changed[..] {
            assert_eq!(card.uuid, uuid(2));
            break;
        }
    }
    let again = stand_in.process().first_inventory().await.unwrap();
    assert_eq!(again.change_since(&first), Some(format!("MIG was switched on on {}", uuid(2))));
    assert_eq!(uuids(&again), [uuid(0), uuid(2), uuid(3)]);
}

#[tokio::test]
async fn a_card_is_closed_for_as_long_as_the_driver_asks_for_a_reset() {
    let stand_in = StandIn::new();
    let asks = stand_in.folder.path().join("recovery-1");
    std::fs::write(&asks, "1").unwrap();
    let mut process = stand_in.process();
    let faults = |cards: &[CardReport]| -> Vec<Option<String>> {
        cards.iter().map(|card| card.fault.clone()).collect()
    };
    let asked = Some("the driver asks for a reset of the card".to_owned());
    assert_eq!(faults(&round(&mut process).await), [None, asked, None, None]);
    std::fs::remove_file(asks).unwrap();
    // The round that has begun may still have asked before.
    while faults(&round(&mut process).await).iter().any(Option::is_some) {}
}

#[tokio::test]
async fn without_a_library_the_error_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let program = env!("CARGO_BIN_EXE_gpu-migrate-bridge").into();
    let library = Some(folder.path().join("libnvidia-ml.so.1"));
    let error = NvmlProcess::new(program, library, Limits::default()).first_inventory().await.unwrap_err();
    assert!(error.to_string().starts_with("NVML: ") && error.to_string().contains("--inventory"), "{error}");
}

/// Processes in cgroups like those that a kubelet makes, where this machine lets a test make some.
#[tokio::test]
async fn what_processes_use_is_sampled_with_their_pod_and_container() {
    const POD: &str = "6f5ac6d6-9d3a-4c38-8d0f-2f4b1b7f8e11";
    const ID: &str = "3b1f0c9d8e7a6b5c4d3e2f1a0b9c8d7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2b1c";
    let stand_in = StandIn::new();
    let mut sleeping = Command::new("sleep").arg("600").spawn().unwrap();
    let mounts = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(Path::new);
    let top = mounts.map(|mount| mount.join(format!("gpu-migrate-nvml-{}", std::process::id())));
    let entered = top.iter().find(|top| {
        let folder = top.join(format!("kubepods/pod{POD}/{ID}"));
        std::fs::create_dir_all(&folder).is_ok()
            && std::fs::write(folder.join("cgroup.procs"), sleeping.id().to_string()).is_ok()
    });
    let in_pod = entered.map(|_| Owner { pod_uid: POD.into(), container_id: ID.into() });
    let text = format!("{} 512 30\n{} 256 5\n", sleeping.id(), std::process::id());
    std::fs::write(stand_in.folder.path().join("process-1"), text).unwrap();

    let mut process = stand_in.process();
    let first = round(&mut process).await;
    sleeping.kill().unwrap();
    sleeping.wait().unwrap();
    for folder in top.iter().flat_map(|top| {
        [format!("kubepods/pod{POD}/{ID}"), format!("kubepods/pod{POD}"), "kubepods".into(), String::new()]
            .map(|below| top.join(below))
    }) {
        let _ = std::fs::remove_dir(folder);
    }
    let sample = |card: usize| first[card].sample.clone().unwrap();
    let idle = sample(0);
    assert_eq!((idle.utilization_percent, idle.memory_used_bytes), (Some(0), Some(0)));
    assert_eq!((idle.power_milliwatts, idle.temperature_celsius), (Some(62_500), Some(31)));
    assert_eq!(idle.processes, Some(vec![]));
    let busy = sample(1);
    assert_eq!((busy.utilization_percent, busy.memory_used_bytes), (Some(35), Some(768 << 20)));
    let processes = busy.processes.unwrap();
    let of = |pid: u32| processes.iter().find(|process| process.pid == pid).unwrap();
    let theirs = of(sleeping.id());
    assert_eq!((theirs.memory_bytes, theirs.utilization_percent), (Some(512 << 20), Some(30)));
    assert_eq!(theirs.owner, in_pod);
    assert_eq!((of(std::process::id()).owner.clone(), processes.len()), (None, 2), "the test is in no pod");
}

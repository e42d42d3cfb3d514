//! The whole agent between a kubelet and an NVIDIA plugin, over real sockets.

#![allow(clippy::unwrap_used, clippy::panic)]

mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;
use support::nvidia::Nvidia;
use support::{Machine, until, uuid};

const GPU: &str = "nvidia.com/gpu";
const CORE: &str = "tencent.com/vcuda-core";
const MEMORY: &str = "tencent.com/vcuda-memory";

fn shared(cores: u32, blocks: u32) -> [(&'static str, u32); 2] {
    [(CORE, cores), (MEMORY, blocks)]
}

async fn both_registered(machine: &Machine) {
    until("both vcuda resources are registered", || {
        machine.kubelet.registered(CORE) && machine.kubelet.registered(MEMORY)
    })
    .await;
}

async fn healthy_cards(machine: &Machine, cards: impl IntoIterator<Item = usize>) {
    let wanted: BTreeSet<String> = cards.into_iter().map(uuid).collect();
    until(&format!("the kubelet sees exactly {wanted:?} healthy"), || machine.kubelet.healthy(GPU) == wanted)
        .await;
}

fn cards_of(ids: &BTreeSet<String>, per_card: usize) -> BTreeSet<usize> {
    ids.iter().map(|id| id.rsplit('-').next().unwrap().parse::<usize>().unwrap() / per_card).collect()
}

#[tokio::test]
async fn a_shared_pod_gets_the_card_that_the_extender_chose_in_either_order() {
    let machine = Machine::start().await;
    both_registered(&machine).await;
    for (name, card, order) in [("a", 3, [(CORE, 50), (MEMORY, 30)]), ("b", 6, [(MEMORY, 20), (CORE, 25)])] {
        let limits = order.map(|(r, n)| (r, n as u32));
        machine.bind(name, &[("main", &limits)], &[("tencent.com/predicate-gpu-idx-0", &card.to_string())]);
        // The file stands for a watch: give it its half second.
        tokio::time::sleep(std::time::Duration::from_millis(700)).await;
        machine.kubelet.admit(name, "main", false, &order).await.unwrap();
        assert_eq!(machine.kubelet.environment(name, "main")["NVIDIA_VISIBLE_DEVICES"], uuid(card));
        assert_eq!(cards_of(&machine.kubelet.ids(name, "main", CORE), 100), BTreeSet::from([card]));
        assert_eq!(cards_of(&machine.kubelet.ids(name, "main", MEMORY), 320), BTreeSet::from([card]));
        machine.kubelet.start_container(name, "main").await.unwrap();
        machine.set_phase(name, "Running");
    }
}

#[tokio::test]
async fn a_refusal_names_the_whole_share_in_either_order() {
    let machine = Machine::start().await;
    both_registered(&machine).await;
    for name in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        machine.bind(name, &[("main", &shared(60, 20))], &[]);
    }
    for name in ["late", "later"] {
        machine.bind(name, &[("main", &shared(50, 20))], &[]);
    }
    // As above.
    tokio::time::sleep(std::time::Duration::from_millis(700)).await;
    for name in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        machine.kubelet.admit(name, "main", false, &shared_order(60, 20)).await.unwrap();
        machine.kubelet.start_container(name, "main").await.unwrap();
    }
    // No card has 50 cores left; each has memory enough.
    for (name, order) in [("late", [(CORE, 50), (MEMORY, 20)]), ("later", [(MEMORY, 20), (CORE, 50)])] {
        let refusal = machine.kubelet.admit(name, "main", false, &order).await.unwrap_err();
        let told = format!("{}: no card of this node has 50 cores and 20 blocks free", order[0].0);
        assert!(refusal.to_string().contains(&told), "{refusal}");
    }
}

#[tokio::test]
async fn the_two_kinds_never_meet_on_a_card() {
    let machine = Machine::start().await;
    both_registered(&machine).await;
    let nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 0..8).await;

    machine.kubelet.admit("shared", "main", false, &shared_order(50, 30)).await.unwrap();
    let taken = machine.kubelet.environment("shared", "main")["NVIDIA_VISIBLE_DEVICES"].clone();
    assert_eq!(taken, uuid(0), "the evaluator packs from the first card");
    healthy_cards(&machine, 1..8).await;

    machine.kubelet.admit("legacy", "main", false, &[(GPU, 5)]).await.unwrap();
    let given = nvidia.plugin.allocated().pop().unwrap();
    assert_eq!(given.len(), 5);
    assert!(!given.contains(&taken));
    let held: BTreeSet<usize> = (0..8).filter(|n| given.contains(&uuid(*n))).collect();
    until("the legacy pod's cards are withdrawn from sharing", || {
        let free = machine.kubelet.healthy(CORE);
        cards_of(&free, 100).is_disjoint(&held)
    })
    .await;
    assert_eq!(nvidia.plugin.streams(), 1);
}

fn shared_order(cores: usize, blocks: usize) -> [(&'static str, usize); 2] {
    [(CORE, cores), (MEMORY, blocks)]
}

/// Where the kubelet would mount this path of a container from.
fn source(machine: &Machine, pod: &str, path: &str) -> PathBuf {
    machine.kubelet.devices.with(|manager| {
        let row = manager.row(pod, "main", CORE).unwrap();
        let mount = row.answer.mounts.iter().find(|mount| mount.container_path == path).unwrap();
        PathBuf::from(&mount.host_path)
    })
}

#[tokio::test]
async fn a_node_takes_shares_only_while_its_isolation_can_limit_them() {
    let machine = Machine::start_with(|folder| {
        let folder = folder.display();
        vec![
            "--isolation=hami-core".into(),
            format!("--library-dir={folder}/lib"),
            format!("--manager-dir={folder}/manager"),
        ]
    })
    .await;
    both_registered(&machine).await;
    let _nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 0..8).await;
    assert!(machine.kubelet.healthy(CORE).is_empty(), "there is no library");

    let library = machine.folder.path().join("lib/hami-core/libvgpu.so");
    std::fs::create_dir_all(library.parent().unwrap()).unwrap();
    std::fs::write(&library, "elf").unwrap();
    until("all cards take shares", || machine.kubelet.healthy(CORE).len() == 800).await;

    for (pod, cores, blocks) in [("a", 50, 30), ("b", 25, 10)] {
        machine.bind(pod, &[("main", &shared(cores, blocks))], &[]);
        let order = shared_order(cores as usize, blocks as usize);
        machine.kubelet.admit(pod, "main", false, &order).await.unwrap();
        machine.kubelet.start_container(pod, "main").await.unwrap();
        assert_eq!(machine.kubelet.environment(pod, "main")["NVIDIA_VISIBLE_DEVICES"], uuid(0));
    }
    let limits = |pod| std::fs::read_to_string(source(&machine, pod, "/overrideEnv")).unwrap();
    assert!(limits("a").contains("CUDA_DEVICE_MEMORY_LIMIT_0=7680m\n"), "{}", limits("a"));
    assert!(limits("b").contains("CUDA_DEVICE_MEMORY_LIMIT_0=2560m\n"), "{}", limits("b"));
    let usage = |pod| source(&machine, pod, "/usr/local/vgpu/cache").canonicalize().unwrap();
    assert_ne!(usage("a"), usage("b"), "two containers on one card");
    assert_eq!(source(&machine, "a", "/usr/local/vgpu/libvgpu.so"), library);

    std::fs::remove_file(&library).unwrap();
    until("no card takes another share", || machine.kubelet.healthy(CORE).len() == 75).await;
    let refusal = machine.kubelet.start_container("b", "main").await.unwrap_err().to_string();
    assert!(refusal.contains("libvgpu.so is missing"), "{refusal}");
}

#[tokio::test]
async fn a_deleted_legacy_pods_card_is_used_again_although_the_checkpoint_still_lists_it() {
    let machine = Machine::start().await;
    both_registered(&machine).await;
    let _nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 0..8).await;
    machine.bind("legacy", &[("main", &[(GPU, 8)])], &[]);
    machine.kubelet.admit("legacy", "main", false, &[(GPU, 8)]).await.unwrap();
    machine.set_phase("legacy", "Running");
    until("nothing is left for shares", || machine.kubelet.healthy(CORE).is_empty()).await;

    machine.kubelet.end("legacy");
    tokio::time::sleep(std::time::Duration::from_millis(1200)).await;
    assert!(machine.kubelet.healthy(CORE).is_empty(), "one source alone frees nothing");
    machine.set_phase("legacy", "Succeeded");
    until("all cards are free for shares", || machine.kubelet.healthy(CORE).len() == 800).await;
    assert!(
        std::fs::read_to_string(machine.plugins().join("kubelet_internal_checkpoint"))
            .unwrap()
            .contains("legacy")
    );
    machine.kubelet.admit("shared", "main", false, &shared_order(100, 80)).await.unwrap();
}

#[tokio::test]
async fn a_restarted_kubelet_is_registered_with_again_and_nothing_moves() {
    let machine = Machine::start().await;
    both_registered(&machine).await;
    let nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 0..8).await;
    machine.bind("s", &[("main", &shared(50, 30))], &[]);
    machine.kubelet.admit("s", "main", false, &shared_order(50, 30)).await.unwrap();
    healthy_cards(&machine, 1..8).await;
    machine.kubelet.restart().await;
    both_registered(&machine).await;
    // Its registration socket was wiped too; the real one registers again as soon as it is back.
    until("NVIDIA's plugin may register again", || {
        machine.plugins().join("gpu-migrate@kubelet.sock").exists()
    })
    .await;
    nvidia.stop.cancel();
    let nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 1..8).await;
    machine.kubelet.admit("l", "main", false, &[(GPU, 7)]).await.unwrap();
    assert!(!nvidia.plugin.allocated()[0].contains(&uuid(0)));
    assert_eq!(machine.kubelet.devices.overlaps(), 0, "old streams end before new registrations");
}

#[tokio::test]
async fn a_killed_agent_knows_the_same_again() {
    let mut machine = Machine::start().await;
    both_registered(&machine).await;
    let nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 0..8).await;
    machine.bind("s", &[("main", &shared(50, 30))], &[]);
    machine.bind("l", &[("main", &[(GPU, 2)])], &[]);
    machine.kubelet.admit("s", "main", false, &shared_order(50, 30)).await.unwrap();
    machine.kubelet.admit("l", "main", false, &[(GPU, 2)]).await.unwrap();
    // The share's card is withdrawn from whole cards, and the cores of the two whole ones from shares.
    until("the lists follow both pods", || {
        machine.kubelet.healthy(GPU).len() == 7 && machine.kubelet.healthy(CORE).len() == 600
    })
    .await;
    let before = (machine.kubelet.healthy(GPU), machine.kubelet.healthy(CORE));
    machine.kill_agent().await;
    nvidia.stop.cancel();
    for socket in ["gpu-migrate@kubelet.sock", "nvidia-gpu.sock"] {
        let _ = std::fs::remove_file(machine.plugins().join(socket));
    }
    machine.start_agent();
    let _nvidia = Nvidia::start(machine.plugins(), 8).await;
    until("both resources are as before", || {
        (machine.kubelet.healthy(GPU), machine.kubelet.healthy(CORE)) == before
    })
    .await;
    assert!(machine.stop_agent().await.is_ok());
}

/// A kubelet that has not noticed the end of a connection refuses its socket's name.
#[tokio::test]
async fn each_registration_has_a_socket_of_its_own() {
    let mut machine = Machine::start().await;
    machine.kubelet.devices.remember_sockets();
    both_registered(&machine).await;
    for _ in 0..2 {
        let before = machine.kubelet.devices.registrations();
        machine.kill_agent().await;
        machine.start_agent();
        until("both vcuda resources are registered anew", || {
            machine.kubelet.devices.registrations() >= before + 2
        })
        .await;
    }
}

/// A share beside a whole card, which is the first one. Returns the share's card.
async fn admitted(machine: &Machine) -> usize {
    both_registered(machine).await;
    machine.bind("w", &[("main", &shared(100, 320))], &[]);
    machine.kubelet.admit("w", "main", false, &shared_order(100, 320)).await.unwrap();
    assert_eq!(cards_of(&machine.kubelet.ids("w", "main", CORE), 100), BTreeSet::from([0]));
    machine.bind("s", &[("main", &shared(50, 30))], &[]);
    machine.kubelet.admit("s", "main", false, &shared_order(50, 30)).await.unwrap();
    machine.kubelet.start_container("s", "main").await.unwrap();
    *cards_of(&machine.kubelet.ids("s", "main", CORE), 100).first().unwrap()
}

/// The agent starts again without a card.
async fn reboot_without(machine: &mut Machine, missing: usize) {
    machine.kill_agent().await;
    let others: Vec<usize> = (0..8).filter(|card| *card != missing).collect();
    machine.set_cards(&others);
    machine.start_agent();
    until("the kubelet has the list of this agent", || {
        !cards_of(&machine.kubelet.healthy(CORE), 100).contains(&missing)
    })
    .await;
}

/// At a reboot the folder of CDI specifications is lost.
#[tokio::test]
async fn a_cdi_specification_is_written_again_before_its_container_starts_again() {
    let flags = |folder: &Path| {
        let specifications = format!("--cdi-spec-dir={}", folder.join("cdi").display());
        vec!["--device-list-strategy=cdi-cri".to_owned(), specifications]
    };
    let mut machine = Machine::start_with(flags).await;
    let card = admitted(&machine).await;
    let folder = machine.folder.path().join("cdi");
    let node = || {
        let file = folder.join(format!("gpu-migrate-tencent.com_vcuda-core-{}.json", card * 100));
        let specification: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
        specification["devices"][0]["containerEdits"]["deviceNodes"][0]["path"].as_str().unwrap().to_owned()
    };
    assert_eq!(node(), format!("/dev/nvidia{card}"));
    std::fs::remove_dir_all(&folder).unwrap();
    reboot_without(&mut machine, 0).await;
    machine.kubelet.start_container("s", "main").await.unwrap();
    assert_eq!(node(), format!("/dev/nvidia{}", card - 1));
}

/// The kubelet shows a container what it was answered once, so a number would be of another card.
#[tokio::test]
async fn a_container_whose_answer_has_a_number_of_another_card_does_not_start() {
    let mut machine = Machine::start_with(|_| vec!["--pass-device-specs".to_owned()]).await;
    let card = admitted(&machine).await;
    // No number is another one without the last card.
    assert!(card < 7);
    reboot_without(&mut machine, 7).await;
    machine.kubelet.start_container("s", "main").await.unwrap();
    reboot_without(&mut machine, 0).await;
    let refused = machine.kubelet.start_container("s", "main").await.unwrap_err().to_string();
    assert!(
        refused.contains(&format!("/dev/nvidia{card}")) && refused.contains("delete the pod"),
        "{refused}"
    );
}

/// A card falls off the bus and the minor numbers change, as at a reboot; then the card map is lost as well.
#[tokio::test]
async fn a_shares_card_stays_withdrawn_when_cards_vanish_and_are_renumbered() {
    let mut machine = Machine::start().await;
    both_registered(&machine).await;
    machine.bind("s", &[("main", &shared(50, 30))], &[("tencent.com/predicate-gpu-idx-0", "3")]);
    // As above.
    tokio::time::sleep(std::time::Duration::from_millis(700)).await;
    machine.kubelet.admit("s", "main", false, &shared_order(50, 30)).await.unwrap();
    machine.kubelet.start_container("s", "main").await.unwrap();
    machine.set_phase("s", "Running");
    assert_eq!(machine.kubelet.environment("s", "main")["NVIDIA_VISIBLE_DEVICES"], uuid(3));
    for map_is_lost in [false, true] {
        machine.kill_agent().await;
        for socket in ["gpu-migrate@kubelet.sock", "nvidia-gpu.sock"] {
            let _ = std::fs::remove_file(machine.plugins().join(socket));
        }
        if map_is_lost {
            std::fs::remove_file(machine.plugins().join("gpu-migrate/cards.json")).unwrap();
        }
        machine.set_cards(&[7, 6, 5, 4, 3, 2, 0]);
        machine.start_agent();
        let nvidia = Nvidia::start(machine.plugins(), 8).await;
        // Card 1 is missing, and nobody but the share has card 3, whatever its minor number is now.
        healthy_cards(&machine, if map_is_lost { vec![0, 1, 2, 4, 5, 6, 7] } else { vec![0, 2, 4, 5, 6, 7] })
            .await;
        nvidia.stop.cancel();
    }
}

#[tokio::test]
async fn a_sick_card_stays_sick_through_a_restart_of_nvidias_plugin() {
    let machine = Machine::start().await;
    both_registered(&machine).await;
    let nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 0..8).await;
    nvidia.fail(&[5]);
    healthy_cards(&machine, [0, 1, 2, 3, 4, 6, 7]).await;
    nvidia.stop.cancel();
    let again = Nvidia::start(machine.plugins(), 8).await;
    until("the new registration is listened to", || again.plugin.streams() == 1).await;
    again.fail(&[6]);
    healthy_cards(&machine, [0, 1, 2, 3, 4, 7]).await;
}

/// Our socket for whole cards, where it is served.
fn legacy_socket(machine: &Machine) -> Option<std::path::PathBuf> {
    let files = std::fs::read_dir(machine.plugins()).unwrap().map(|file| file.unwrap().path());
    files.into_iter().find(|path| path.to_string_lossy().contains("gpu-migrate-nvidia.com_gpu-"))
}

/// The kubelet keeps one plugin a resource, and forgets a new one when the stream of the old one ends after it began.
#[tokio::test]
async fn nvidias_plugin_that_goes_finds_its_place_at_the_kubelet_free() {
    let machine = Machine::start().await;
    both_registered(&machine).await;
    let nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 0..8).await;
    assert!(legacy_socket(&machine).is_some());
    nvidia.stop.cancel();
    until("nothing of ours is served for it", || legacy_socket(&machine).is_none()).await;
    let _again = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 0..8).await;
    assert!(legacy_socket(&machine).is_some(), "it came back to the bridge");
    assert_eq!(machine.kubelet.devices.overlaps(), 0);
}

/// `KUBELET_SOCKET` was never set, or is lost in an update: the agent registers over the plugin, and again when the plugin starts anew.
#[tokio::test]
async fn a_plugin_that_registers_with_the_kubelet_itself_is_registered_over() {
    let machine = Machine::start().await;
    both_registered(&machine).await;
    let mut nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, 0..8).await;
    machine.bind("s", &[("main", &shared(50, 30))], &[("tencent.com/predicate-gpu-idx-0", "3")]);
    // As above.
    tokio::time::sleep(std::time::Duration::from_millis(700)).await;
    machine.kubelet.admit("s", "main", false, &shared_order(50, 30)).await.unwrap();
    machine.set_phase("s", "Running");
    healthy_cards(&machine, [0, 1, 2, 4, 5, 6, 7]).await;
    for _ in 0..3 {
        nvidia.stop.cancel();
        nvidia = Nvidia::start_at_kubelet(machine.plugins(), 8);
        until("the plugin is listened to by the kubelet and by the agent", || nvidia.plugin.streams() > 1)
            .await;
        healthy_cards(&machine, [0, 1, 2, 4, 5, 6, 7]).await;
    }
    machine.kubelet.admit("l", "main", false, &[(GPU, 7)]).await.unwrap();
    assert!(!nvidia.plugin.allocated()[0].contains(&uuid(3)));
    until("whole cards are withdrawn from sharing", || {
        cards_of(&machine.kubelet.healthy(CORE), 100) == BTreeSet::from([3])
    })
    .await;
}

/// The connection to the plugin breaks only after it has registered anew: a new process of it, or a kubelet that has just started.
#[tokio::test]
async fn a_plugin_that_registers_with_the_kubelet_before_its_connection_breaks_is_called_again() {
    let machine = Machine::start_with(|_| vec!["--register-over-nvidia-plugin".into()]).await;
    both_registered(&machine).await;
    let before = Nvidia::start_at_kubelet(machine.plugins(), 8);
    until("the plugin is listened to by the kubelet and by the agent", || before.plugin.streams() > 1).await;
    healthy_cards(&machine, 0..8).await;
    let socket = legacy_socket(&machine);
    let after = Nvidia::start_at_kubelet(machine.plugins(), 8);
    until("the agent registers over the plugin", || legacy_socket(&machine) != socket).await;
    before.stop.cancel();
    until("the agent listens to the plugin as well", || after.plugin.streams() > 1).await;
    healthy_cards(&machine, 0..8).await;
}

/// The API server may not answer the agent that starts.
#[tokio::test]
async fn a_cordon_survives_a_restart() {
    let mut machine = Machine::start().await;
    both_registered(&machine).await;
    machine.stop_agent().await.unwrap();
    std::fs::write(machine.plugins().join("gpu-migrate/cordoned-cards"), format!("2,{}", uuid(5))).unwrap();
    machine.start_agent();
    let _nvidia = Nvidia::start(machine.plugins(), 8).await;
    healthy_cards(&machine, [0, 1, 3, 4, 6, 7]).await;
}

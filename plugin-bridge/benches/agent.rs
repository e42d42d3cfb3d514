//! What the node waits for: Allocate and GetPreferredAllocation of both plugins, and reading the kubelet checkpoint.
//!
//! `cargo bench -p gpu-migrate-plugin-bridge`. Eight cards of 80 GiB: 800 + 2,560 IDs. Allocates include everything but the socket: the
//! stamp of the checkpoint, the decision, the state, the answer. As baselines of the same run: parsing the same bytes into
//! `serde_json::Value`, and a bare `stat`.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use gpu_migrate_kubelet_api::checkpoint::Checkpoint;
use gpu_migrate_kubelet_api::deviceplugin::device_plugin_server::DevicePlugin;
use gpu_migrate_kubelet_api::deviceplugin::{AllocateRequest, ContainerAllocateRequest};
use gpu_migrate_model::ask::{ContainerAsk, ContainerKind, Demand};
use gpu_migrate_model::card::Card;
use gpu_migrate_model::device_id::SharedResource;
use gpu_migrate_model::topology::{LinkLevel, Topology};
use gpu_migrate_model::units::{Blocks, CardIndex, Cores};
use gpu_migrate_plugin_bridge::decide::{ContainerView, NodeState, PodView, Settings, UpstreamDevice};
use gpu_migrate_plugin_bridge::isolation::NoIsolation;
use gpu_migrate_plugin_bridge::metrics::Metrics;
use gpu_migrate_plugin_bridge::node::{EarlierRecord, Node, Paths};
use gpu_migrate_plugin_bridge::plugins::answer::AnswerStyle;
use gpu_migrate_plugin_bridge::plugins::list_and_watch::Streams;
use gpu_migrate_plugin_bridge::plugins::shared::{AllocateConfig, SharedPlugin};

const GPU: &str = "nvidia.com/gpu";

fn uuid(n: u32) -> String {
    format!("GPU-{n:08}-1111-2222-3333-{n:012}")
}

fn cards() -> Vec<Card> {
    (0..8).map(|minor| Card { uuid: uuid(minor), minor, memory_mib: 81920, ..Card::default() }).collect()
}

/// 100 shared pods of 8 cores and 24 blocks in the kubelet checkpoint.
fn checkpoint_text() -> Vec<u8> {
    let rows: Vec<_> = (0..100_u32)
        .flat_map(|pod| {
            let (card, place) = (pod / 13, pod % 13);
            let cores: Vec<_> = (0..7).map(|n| format!("tencent.com/vcuda-core-{}", card * 100 + place * 7 + n)).collect();
            let blocks: Vec<_> =
                (0..24).map(|n| format!("tencent.com/vcuda-memory-268435456-{}", card * 320 + place * 24 + n)).collect();
            let answer = "CkMKFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSKUdQVS0wMDAwMDAwMC0xMTExLTIyMjItMzMzMy0wMDAwMDAwMDAwMDA=";
            let uid = format!("{pod:08}-7fff-4aaa-8bbb-0123456789ab");
            [("tencent.com/vcuda-core", cores), ("tencent.com/vcuda-memory", blocks)].map(|(resource, ids)| {
                serde_json::json!({"PodUID": uid, "ContainerName": "main", "ResourceName": resource,
                    "DeviceIDs": {"-1": ids}, "AllocResp": answer})
            })
        })
        .collect();
    let registered = serde_json::json!({
        "tencent.com/vcuda-core": (0..800).map(|n| format!("tencent.com/vcuda-core-{n}")).collect::<Vec<_>>(),
        "tencent.com/vcuda-memory": (0..2560).map(|n| format!("tencent.com/vcuda-memory-268435456-{n}")).collect::<Vec<_>>(),
    });
    serde_json::json!({"Data": {"PodDeviceEntries": rows, "RegisteredDevices": registered}, "Checksum": 1})
        .to_string()
        .into_bytes()
}

fn state(filled: bool) -> NodeState {
    let mut state = NodeState::new(Settings::default(), cards(), &Topology::uniform(8, LinkLevel::Pix));
    state.observe_pods(Vec::new(), 1);
    let text = if filled { checkpoint_text() } else { br#"{"Data":{"PodDeviceEntries":null}}"#.to_vec() };
    state.ingest_checkpoint(&Checkpoint::parse(&text).unwrap_or_default(), 1);
    let devices = (0..8).map(|n| UpstreamDevice { id: uuid(n).into(), healthy: true, numa: Vec::new() });
    state.observe_upstream(GPU, Some(devices.collect()));
    for n in 0..50_u32 {
        let ask = ContainerAsk {
            name: "main".into(),
            kind: ContainerKind::App,
            position: 0,
            demand: Demand { cores: Cores(5), blocks: Blocks(4), legacy: 0 },
        };
        let container = ContainerView { ask, reserved: vec![CardIndex(7)] };
        let uid = format!("pod-{n}");
        state.observe_pod(
            PodView {
                uid: uid.clone(),
                name: uid,
                order: u64::from(n),
                containers: vec![container],
                ..PodView::default()
            },
            2,
        );
    }
    state
}

fn core_ids(card: u32, count: u32) -> Vec<String> {
    (0..count).map(|n| format!("tencent.com/vcuda-core-{}", card * 100 + 91 + n)).collect()
}

fn decisions(c: &mut Criterion) {
    let filled = state(true);
    c.bench_function("decide/allocate shared, 100 pods on the node", |b| {
        let ids = core_ids(7, 5);
        b.iter_batched_ref(
            || filled.clone(),
            |state| state.allocate_shared(SharedResource::Cores, black_box(&ids), 3),
            BatchSize::LargeInput,
        );
    });
    let offered: Vec<String> = (0..800).map(|n| format!("tencent.com/vcuda-core-{n}")).collect();
    c.bench_function("decide/prefer shared, 800 offered", |b| {
        b.iter(|| filled.preferred_shared(SharedResource::Cores, black_box(&offered), &[], 5));
    });
    let empty = state(false);
    c.bench_function("decide/allocate legacy, 8 cards", |b| {
        let ids: Vec<String> = (0..8).map(uuid).collect();
        b.iter_batched_ref(
            || empty.clone(),
            |state| state.allocate_legacy(GPU, black_box(&ids), 3),
            BatchSize::LargeInput,
        );
    });
}

fn service(c: &mut Criterion) {
    let Ok(folder) = tempfile::tempdir() else { return };
    let plugins = folder.path().join("device-plugins");
    if std::fs::create_dir_all(&plugins).is_err()
        || std::fs::write(plugins.join("kubelet_internal_checkpoint"), checkpoint_text()).is_err()
    {
        return;
    }
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    let node = || {
        let paths = Paths {
            kubelet: folder.path().to_path_buf(),
            state: folder.path().join("state"),
            cgroups: folder.path().join("cgroup"),
        };
        Node::start(
            paths,
            EarlierRecord::default(),
            state(true),
            Topology::uniform(8, LinkLevel::Pix),
            Metrics::default(),
        )
    };
    c.bench_function("service/Allocate shared, everything but the socket", |b| {
        b.iter_batched(
            || {
                let config = AllocateConfig {
                    tracer: Default::default(),
                    style: AnswerStyle::default(),
                    isolation: Arc::new(NoIsolation),
                    cdi: None,
                };
                SharedPlugin::new(node(), SharedResource::Cores, Arc::new(config), Streams::default())
            },
            |plugin| {
                let ask = ContainerAllocateRequest { devices_ids: core_ids(7, 5) };
                let request = tonic::Request::new(AllocateRequest { container_requests: vec![ask] });
                (runtime.block_on(plugin.allocate(request)).is_ok(), plugin)
            },
            BatchSize::LargeInput,
        );
    });
}

fn checkpoint(c: &mut Criterion) {
    let text = checkpoint_text();
    let mut group = c.benchmark_group(format!("checkpoint/{} KB, 100 pods, 3360 IDs", text.len() / 1000));
    group.bench_function("read", |b| b.iter(|| Checkpoint::parse(black_box(&text)).is_ok()));
    group.bench_function("baseline: into serde_json::Value", |b| {
        b.iter(|| serde_json::from_slice::<serde_json::Value>(black_box(&text)).is_ok());
    });
    let parsed = Checkpoint::parse(&text).unwrap_or_default();
    group.bench_function("observe, nothing new", |b| {
        let mut state = state(true);
        b.iter(|| state.ingest_checkpoint(black_box(&parsed), 5));
    });
    group.bench_function("baseline: one stat", |b| {
        b.iter(|| std::fs::metadata(black_box(Path::new("/"))).is_ok());
    });
    group.finish();
}

criterion_group!(benches, decisions, service, checkpoint);
criterion_main!(benches);

//! The same as metrics. Labels are those that users of dcgm-exporter join on.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use gpu_migrate_model::usage::{CardUse, ContainerUse, UseKind};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;

use super::Usage;

type Labels = Vec<(&'static str, String)>;

#[derive(Debug)]
pub(super) struct Export(pub(super) Arc<Usage>);

/// A gauge with a series for each row that has a value.
fn family<R>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    rows: &[(Labels, R)],
    value: impl Fn(&R) -> Option<f64>,
) -> fmt::Result {
    let mut values = rows.iter().filter_map(|(labels, row)| Some((labels, value(row)?))).peekable();
    if values.peek().is_none() {
        return Ok(());
    }
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    values.try_for_each(|(labels, value)| metric.encode_family(labels)?.encode_gauge(&value))
}

impl Collector for Export {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        let cards = self.0.report().cards;
        let label = |card: &CardUse| vec![("UUID", card.uuid.clone()), ("gpu", card.index.to_string())];
        let with_model = |card: &CardUse| {
            let mut labels = label(card);
            labels.push(("modelName", card.model.clone()));
            labels
        };
        let of_cards: Vec<(Labels, &CardUse)> = cards.iter().map(|card| (with_model(card), card)).collect();
        let of_containers: Vec<(Labels, &ContainerUse)> = cards
            .iter()
            .flat_map(|card| {
                card.containers.iter().map(move |row| {
                    let mut labels = label(card);
                    labels.extend([
                        ("namespace", row.namespace.clone()),
                        ("pod", row.pod.clone()),
                        ("container", row.container.clone()),
                        ("kind", row.kind.as_str().to_owned()),
                    ]);
                    (labels, row)
                })
            })
            .collect();
        let percent = |value: Option<u32>| value.map(|percent| f64::from(percent) / 100.0);
        // Below 2^53, so exact.
        let bytes = |value: Option<u64>| value.map(|bytes| bytes as f64);
        let c = &of_cards;
        family(e, "card_memory_bytes", "Memory of the card", c, |r| bytes(Some(r.memory_bytes)))?;
        family(e, "card_memory_used_bytes", "Memory of the card that is in use", c, |r| {
            bytes(r.memory_used_bytes)
        })?;
        family(e, "card_utilization_ratio", "Part of the time in which a kernel ran on the card", c, |r| {
            percent(r.utilization_percent)
        })?;
        family(e, "card_power_watts", "Power that the card draws", c, |r| {
            r.power_milliwatts.map(|milliwatts| f64::from(milliwatts) / 1000.0)
        })?;
        family(e, "card_temperature_celsius", "Temperature of the GPU", c, |r| {
            r.temperature_celsius.map(f64::from)
        })?;
        let c = &of_containers;
        family(e, "container_processes", "Processes that the container has on the card", c, |r| {
            r.processes.map(f64::from)
        })?;
        family(
            e,
            "container_utilization_ratio",
            "Part of the card's multiprocessors that the container kept busy",
            c,
            |r| percent(r.utilization_percent),
        )?;
        family(e, "container_memory_used_bytes", "Memory of the card that the container uses", c, |r| {
            bytes(r.memory_used_bytes)
        })?;
        family(
            e,
            "container_requested_ratio",
            "Part of the card that the container requested; 1 for a whole card",
            c,
            |r| percent(r.cores_requested),
        )?;
        family(
            e,
            "container_memory_requested_bytes",
            "Memory of the card that the container requested; all of a whole card",
            c,
            |r| bytes(r.memory_requested_bytes),
        )?;
        self.encode_xids(e)
    }
}

impl Export {
    fn encode_xids(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let xids = self.0.xids.lock().clone();
        if xids.is_empty() {
            return Ok(());
        }
        let help = "XID errors of the card since the start";
        let mut metric = encoder.encode_descriptor("card_xid_errors", help, None, MetricType::Counter)?;
        xids.into_iter().try_for_each(|((uuid, xid), count)| {
            let labels = vec![("UUID", uuid), ("xid", xid.to_string())];
            ConstCounter::new(count).encode(metric.encode_family(&labels)?)
        })
    }
}

/// The gauges of gpu-manager (`pkg/services/display`), with its names, labels and units, for dashboards that were made for it.
#[derive(Debug)]
pub(super) struct GpuManager(pub(super) Arc<Usage>);

impl Collector for GpuManager {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(node) = self.0.name.get() else { return Ok(()) };
        let cards = self.0.report().cards;
        let mut containers: BTreeMap<[&str; 3], Vec<(u32, &ContainerUse)>> = BTreeMap::new();
        for card in &cards {
            for row in card.containers.iter().filter(|row| row.kind != UseKind::None) {
                let of = [&*row.namespace, &*row.pod, &*row.container];
                containers.entry(of).or_default().push((card.index, row));
            }
        }
        let mib = |bytes: u64| (bytes >> 20) as f64;
        let used: [Gauge<'_>; 2] = [
            ("container_gpu_utilization", "gpu utilization", "gpu", &|row| {
                row.utilization_percent.map(f64::from)
            }),
            ("container_gpu_memory_total", "gpu memory usage in MiB", "gpu_memory", &|row| {
                row.memory_used_bytes.map(mib)
            }),
        ];
        let requested: [Gauge<'_>; 2] = [
            ("container_request_gpu_utilization", "request of gpu utilization", "req_of_gpu", &|row| {
                row.cores_requested.map(|cores| f64::from(cores) / 100.0)
            }),
            ("container_request_gpu_memory", "request of gpu memory in MiB", "req_of_gpu_memory", &|row| {
                row.memory_requested_bytes.map(mib)
            }),
        ];
        for ((name, help, label, value), by_card) in
            used.into_iter().map(|gauge| (gauge, true)).chain(requested.map(|gauge| (gauge, false)))
        {
            let mut rows: Vec<(Labels, f64)> = Vec::new();
            for ([namespace, pod, container], on_cards) in &containers {
                let labels = |of: String| {
                    let names = [("pod_name", *pod), ("namespace", *namespace), ("node", node.as_str())];
                    let mut labels: Labels = names.map(|(name, value)| (name, value.to_owned())).into();
                    labels.extend([("container_name", (*container).to_owned()), (label, of)]);
                    labels
                };
                let values: Vec<(u32, f64)> =
                    on_cards.iter().filter_map(|(card, row)| Some((*card, value(row)?))).collect();
                if values.is_empty() {
                    continue;
                }
                let each = values.iter().filter(|_| by_card);
                rows.extend(each.map(|(card, value)| (labels(format!("gpu{card}")), *value)));
                rows.push((labels("total".to_owned()), values.iter().map(|(_, value)| value).sum()));
            }
            family(&mut encoder, name, help, &rows, |value| Some(*value))?;
        }
        Ok(())
    }
}

/// Name, help, the label that names the card, and the value.
type Gauge<'g> = (&'static str, &'static str, &'static str, &'g dyn Fn(&ContainerUse) -> Option<f64>);

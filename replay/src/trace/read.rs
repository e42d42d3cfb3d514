//! The CSV files of a trace.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use gpu_migrate_model::score::HostResources;
use gpu_migrate_model::units::Cores;
use serde::Deserialize;

/// Thousandths of a card in one core.
const MILLI_PER_CORE: u32 = 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceNode {
    pub name: String,
    pub host: HostResources,
    pub cards: u32,
    pub model: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePod {
    pub name: String,
    /// CPU and memory that it asks for.
    pub host: HostResources,
    /// Cores on all its cards together: below 100 a share of one, else whole cards.
    pub cores: Cores,
    /// Models that will do; empty: any.
    pub models: Vec<String>,
    /// Its share was no whole number of cores and was rounded up.
    pub rounded: bool,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("{path}: {source}")]
    Open { path: PathBuf, source: std::io::Error },
    /// Not a CSV file, or not one with these columns.
    #[error("{path}: {source} (expected columns: {columns})")]
    Csv {
        path: PathBuf,
        /// Columns that must be there.
        columns: &'static str,
        /// Which line, and what is wrong.
        source: csv::Error,
    },
    /// A request that no card can meet.
    #[error(
        "{path}: pod {pod}: num_gpu is {num_gpu} and gpu_milli is {gpu_milli}: expected a share (num_gpu 1, gpu_milli 1 to 1000) or whole cards (gpu_milli 1000)"
    )]
    Share { path: PathBuf, pod: String, num_gpu: u32, gpu_milli: u32 },
    #[error("{path}: no {what} in it")]
    Empty { path: PathBuf, what: &'static str },
}

const NODE_COLUMNS: &str = "sn, cpu_milli, memory_mib, gpu, model";
const POD_COLUMNS: &str = "name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec";

#[derive(Deserialize)]
struct NodeRow {
    sn: String,
    cpu_milli: u32,
    memory_mib: u32,
    gpu: u32,
    #[serde(default)]
    model: String,
}

#[derive(Deserialize)]
struct PodRow {
    name: String,
    cpu_milli: u32,
    memory_mib: u32,
    num_gpu: u32,
    gpu_milli: Option<u32>,
    #[serde(default)]
    gpu_spec: String,
}

/// Reads the nodes of a trace.
///
/// # Errors
/// [`TraceError`] with the file and the line.
pub fn nodes(path: &Path) -> Result<Vec<TraceNode>, TraceError> {
    let rows: Vec<NodeRow> = rows(path, open(path)?, NODE_COLUMNS)?;
    let nodes: Vec<TraceNode> = rows.into_iter().map(node).collect();
    let empty = |what| Err(TraceError::Empty { path: path.to_owned(), what });
    match nodes.iter().map(|node| node.cards).sum() {
        _ if nodes.is_empty() => empty("nodes"),
        0_u32 => empty("cards"),
        _ => Ok(nodes),
    }
}

/// Reads the pods of a trace, sorted by name.
///
/// # Errors
/// [`TraceError`] with the file and the line or pod.
pub fn pods(path: &Path) -> Result<Vec<TracePod>, TraceError> {
    let rows: Vec<PodRow> = rows(path, open(path)?, POD_COLUMNS)?;
    let mut pods = rows.into_iter().map(|row| pod(path, row)).collect::<Result<Vec<_>, _>>()?;
    if pods.iter().all(|pod| pod.cores == Cores::ZERO) {
        return Err(TraceError::Empty { path: path.to_owned(), what: "pods that ask for cards" });
    }
    pods.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(pods)
}

fn open(path: &Path) -> Result<File, TraceError> {
    File::open(path).map_err(|source| TraceError::Open { path: path.to_owned(), source })
}

fn rows<T: for<'de> Deserialize<'de>>(
    path: &Path,
    from: impl Read,
    columns: &'static str,
) -> Result<Vec<T>, TraceError> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).from_reader(from);
    let rows: Result<Vec<T>, csv::Error> = reader.deserialize().collect();
    rows.map_err(|source| TraceError::Csv { path: path.to_owned(), columns, source })
}

fn node(row: NodeRow) -> TraceNode {
    let host = HostResources { cpu_milli: row.cpu_milli, memory_mib: row.memory_mib };
    TraceNode { name: row.sn, host, cards: row.gpu, model: row.model }
}

fn pod(path: &Path, row: PodRow) -> Result<TracePod, TraceError> {
    let PodRow { name, cpu_milli, memory_mib, num_gpu, gpu_milli, gpu_spec } = row;
    let gpu_milli = if num_gpu == 0 { 0 } else { gpu_milli.unwrap_or(1_000) };
    let cores = match (num_gpu, gpu_milli) {
        (0, _) => Cores::ZERO,
        (cards, 1_000) => Cores(cards.saturating_mul(Cores::CARD.0)),
        (1, milli @ 1..1_000) => Cores(milli.div_ceil(MILLI_PER_CORE)),
        _ => return Err(TraceError::Share { path: path.to_owned(), pod: name, num_gpu, gpu_milli }),
    };
    Ok(TracePod {
        name,
        host: HostResources { cpu_milli, memory_mib },
        cores,
        models: gpu_spec.split('|').filter(|model| !model.is_empty()).map(str::to_owned).collect(),
        rounded: !gpu_milli.is_multiple_of(MILLI_PER_CORE),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<TracePod>, TraceError> {
        let rows: Vec<PodRow> = rows(Path::new("pods.csv"), text.as_bytes(), POD_COLUMNS)?;
        rows.into_iter().map(|row| pod(Path::new("pods.csv"), row)).collect()
    }

    const HEAD: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos\n";

    #[test]
    fn shares_cards_and_models_are_read() {
        let pods = read(&format!("{HEAD}a,1,2,1,460,,LS\nb,1,2,1,1000,V100M16|V100M32,LS\nc,1,2,8,1000,,LS\nd,1,2,0,0,,LS\ne,1,2,0,,,LS\nf,1,2,1,455,,LS\ng,1,2,1,995,,LS\n")).unwrap();
        let cores: Vec<u32> = pods.iter().map(|pod| pod.cores.0).collect();
        assert_eq!(cores, [46, 100, 800, 0, 0, 46, 100]);
        assert_eq!(pods.iter().filter(|pod| pod.rounded).count(), 2);
        assert_eq!(pods[1].models, ["V100M16", "V100M32"]);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (text, expected) in [
            (format!("{HEAD}a,1,2,2,500,,LS\n"), "pods.csv: pod a: num_gpu is 2 and gpu_milli is 500"),
            (format!("{HEAD}a,1,2,1,0,,LS\n"), "gpu_milli is 0"),
            (format!("{HEAD}a,one,2,1,0,,LS\n"), "line: 2"),
            ("name,cpu\na,1\n".to_owned(), "expected columns: name, cpu_milli"),
        ] {
            let error = read(&text).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}

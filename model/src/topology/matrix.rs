//! The link matrix of a node, from NVML's answers or from the text of `nvidia-smi topo -m`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{LinkLevel, Tree};
use crate::units::CardIndex;

/// The best path between every two cards of a node. Symmetric.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "Vec<Vec<Option<LinkLevel>>>", into = "Vec<Vec<Option<LinkLevel>>>")]
#[schemars(with = "Vec<Vec<Option<LinkLevel>>>")]
pub struct Topology {
    /// `rows[i][j]` for j < i.
    lower: Vec<Vec<LinkLevel>>,
}

/// Why a text or table is not a link matrix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    /// There is no line that begins with `GPU0`.
    #[error("no row GPU0: expected the output of `nvidia-smi topo -m`")]
    Empty,
    /// Rows are not GPU0, GPU1, … in order.
    #[error("row {row}: expected GPU{row}, found {found:?}")]
    Row {
        /// Number of the row, from 0.
        row: usize,
        /// What it begins with.
        found: String,
    },
    /// A row is shorter than the matrix is wide.
    #[error("row GPU{row}: {found} cells, expected {expected}: one for each GPU")]
    Short {
        /// Number of the row, from 0.
        row: usize,
        /// Cells in it.
        found: usize,
        /// GPUs of the matrix.
        expected: usize,
    },
    /// A cell is no link level.
    #[error(
        "row GPU{row}, column GPU{column}: {found:?} is not one of X, NV#, PIX, PXB, PHB, NODE, SYS, SOC"
    )]
    Cell {
        /// Number of the row, from 0.
        row: usize,
        /// Number of the column, from 0.
        column: usize,
        /// What stands there.
        found: String,
    },
    /// Two cells that must agree do not.
    #[error("GPU{row} to GPU{column} is {there}, but GPU{column} to GPU{row} is {back}")]
    Asymmetric {
        /// Number of the row, from 0.
        row: usize,
        /// Number of the column, from 0.
        column: usize,
        /// Level in the row.
        there: LinkLevel,
        /// Level in the column.
        back: LinkLevel,
    },
}

impl Topology {
    /// A node whose cards are all linked alike.
    #[must_use]
    pub fn uniform(cards: usize, level: LinkLevel) -> Self {
        Self::from_fn(cards, |_, _| level)
    }

    /// Asks `level` once for each pair, with the larger index first.
    pub fn from_fn(cards: usize, mut level: impl FnMut(CardIndex, CardIndex) -> LinkLevel) -> Self {
        let lower =
            (0..cards).map(|row| (0..row).map(|column| level(row.into(), column.into())).collect()).collect();
        Self { lower }
    }

    /// Reads the text of `nvidia-smi topo -m`. Columns after the GPUs (NICs, CPU and NUMA affinity) and the legend are
    /// ignored.
    ///
    /// # Errors
    /// The row and column that cannot be read.
    pub fn parse(text: &str) -> Result<Self, MatrixError> {
        let mut rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>())
            .filter(|cells| cells.first().is_some_and(|cell| cell.starts_with("GPU")))
            .collect();
        // The header begins with GPU0 as well, but has no cell for "self".
        if rows.first().is_some_and(|cells| !cells.contains(&"X")) {
            rows.remove(0);
        }
        if rows.is_empty() {
            return Err(MatrixError::Empty);
        }
        let expected = rows.len();
        let mut cells = Vec::with_capacity(expected);
        for (row, line) in rows.iter().enumerate() {
            if line[0] != format!("GPU{row}") {
                return Err(MatrixError::Row { row, found: line[0].to_owned() });
            }
            if line.len() - 1 < expected {
                return Err(MatrixError::Short { row, found: line.len() - 1, expected });
            }
            let levels =
                line[1..=expected].iter().enumerate().map(|(column, cell)| match *cell {
                    "X" if row == column => Ok(None),
                    cell if row != column => LinkLevel::parse(cell)
                        .map(Some)
                        .ok_or_else(|| MatrixError::Cell { row, column, found: cell.to_owned() }),
                    cell => Err(MatrixError::Cell { row, column, found: cell.to_owned() }),
                });
            cells.push(levels.collect::<Result<Vec<_>, _>>()?);
        }
        Self::try_from(cells)
    }

    /// How many cards.
    #[must_use]
    pub fn cards(&self) -> usize {
        self.lower.len()
    }

    /// The path between two cards; `None` for a card with itself or one that is not there.
    #[must_use]
    pub fn between(&self, one: CardIndex, other: CardIndex) -> Option<LinkLevel> {
        let (low, high) = if one < other { (one, other) } else { (other, one) };
        self.lower.get(high.position())?.get(low.position()).copied()
    }

    /// The tree that placement walks.
    #[must_use]
    pub fn tree(&self) -> Tree {
        Tree::new(self)
    }
}

impl TryFrom<Vec<Vec<Option<LinkLevel>>>> for Topology {
    type Error = MatrixError;

    fn try_from(cells: Vec<Vec<Option<LinkLevel>>>) -> Result<Self, MatrixError> {
        let expected = cells.len();
        let missing = |row, column| MatrixError::Cell { row, column, found: String::new() };
        let mut lower = Vec::with_capacity(expected);
        for (row, line) in cells.iter().enumerate() {
            if line.len() < expected {
                return Err(MatrixError::Short { row, found: line.len(), expected });
            }
            let mut levels = Vec::with_capacity(row);
            for column in 0..row {
                let there = line[column].ok_or_else(|| missing(row, column))?;
                let back = cells[column].get(row).copied().flatten().ok_or_else(|| missing(column, row))?;
                if there != back {
                    return Err(MatrixError::Asymmetric { row, column, there, back });
                }
                levels.push(there);
            }
            lower.push(levels);
        }
        Ok(Self { lower })
    }
}

impl From<Topology> for Vec<Vec<Option<LinkLevel>>> {
    fn from(topology: Topology) -> Self {
        let cards = topology.cards();
        let cell = |row: usize, column: usize| topology.between(row.into(), column.into());
        (0..cards).map(|row| (0..cards).map(|column| cell(row, column)).collect()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a DGX-1 with a network card prints it.
    const MODERN: &str = "\
\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\tSYS\tPXB\t0-63\t0\t\tN/A
GPU1\tNV12\t X \tNODE\tPXB\t0-63\t0\t\tN/A
GPU2\tSYS\tNODE\t X \tSYS\t64-127\t1\t\tN/A
NIC0\tPXB\tPXB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
";

    #[test]
    fn reads_nvidia_smi() {
        let topology = Topology::parse(MODERN).unwrap();
        assert_eq!(topology.cards(), 3);
        assert_eq!(topology.between(CardIndex(0), CardIndex(1)), Some(LinkLevel::NvLink));
        assert_eq!(topology.between(CardIndex(2), CardIndex(1)), Some(LinkLevel::Node));
        assert_eq!(topology.between(CardIndex(0), CardIndex(2)), Some(LinkLevel::Sys));
        assert_eq!(topology.between(CardIndex(1), CardIndex(1)), None);
    }

    #[test]
    fn reads_one_card() {
        let topology = Topology::parse("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n").unwrap();
        assert_eq!(topology.cards(), 1);
    }

    #[test]
    fn errors_name_row_and_column() {
        let table = [
            ("", "no row GPU0"),
            ("GPU0 X PIX\nGPU2 PIX X", "row 1: expected GPU1, found \"GPU2\""),
            ("GPU0 X PIX\nGPU1 PIX", "row GPU1: 1 cells, expected 2"),
            ("GPU0 X FAR\nGPU1 PIX X", "row GPU0, column GPU1: \"FAR\" is not one of"),
            ("GPU0 X PIX\nGPU1 PHB X", "GPU1 to GPU0 is PHB, but GPU0 to GPU1 is PIX"),
            ("GPU0 X NV\nGPU1 NV X", "\"NV\" is not one of"),
        ];
        for (text, message) in table {
            let error = Topology::parse(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text:?}: {error}");
        }
    }

    #[test]
    fn survives_json() {
        let topology = Topology::parse(MODERN).unwrap();
        let json = serde_json::to_string(&topology).unwrap();
        assert_eq!(json, r#"[[null,"NV","SYS"],["NV",null,"NODE"],["SYS","NODE",null]]"#);
        assert_eq!(serde_json::from_str::<Topology>(&json).unwrap(), topology);
        assert!(serde_json::from_str::<Topology>(r#"[[null,"NV"],["PIX",null]]"#).is_err());
    }
}

//! Manifests as people keep them: files, folders and stdin, YAML or JSON, several documents, Lists in Lists.
//!
//! Everything here is read with its origin, so that whatever is wrong with an object later can be reported
//! together with the file, the document and the line it stands in.

mod object;
mod packed;
mod parse;
mod source;

pub use object::{Manifest, ManifestError, PodForm, expand, expand_packed};
pub(crate) use object::{as_written, has_ended, is_object_of_cluster, without_controlled};
pub use packed::Packed;
pub use parse::{ParseError, documents, packed};
pub use source::{Input, SourceError, read_inputs};

use std::fmt;
use std::path::PathBuf;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A file, by the path it was found under.
    File(PathBuf),
    /// Standard input, written `-` on the command line.
    Stdin,
    Cluster,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Stdin => f.write_str("stdin"),
            Self::Cluster => f.write_str("cluster"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    pub source: Source,
    /// The document of the stream, counted from 1; empty documents are not counted.
    pub document: usize,
    /// The line the document begins on, counted from 1.
    pub line: u64,
    /// Positions in nested Lists, outermost first, counted from 0 as in `items[0]`.
    pub items: Vec<usize>,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.source == Source::Cluster {
            return f.write_str("cluster");
        }
        write!(f, "{}:{} (document {}", self.source, self.line, self.document)?;
        for index in &self.items {
            write!(f, ", items[{index}]")?;
        }
        f.write_str(")")
    }
}

/// One document of a stream, still untyped.
#[derive(Debug, Clone)]
pub struct Document<V = serde_json::Value> {
    pub origin: Origin,
    pub value: V,
}

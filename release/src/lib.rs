//! What a release consists of, made from a folder of built programs, and the same bytes each time: container images as OCI
//! layouts, without a container daemon; the command line, the chart and the manifests.
//!
//! [`oci`] writes any image, [`debian`] reads the root file system from Debian packages, [`images`] says which images there
//! are, [`bundle`] makes the other files, [`notices`] says what all of it is built of, [`provenance`] how, and [`signed`] signs and
//! verifies it. The three JSON documents of an image are written by hand: the crate that has them as types (`oci-spec`) would
//! bring twelve more.

pub mod bundle;
pub mod debian;
pub mod images;
pub mod notices;
pub mod oci;
pub mod provenance;
pub mod signature;
pub mod signed;

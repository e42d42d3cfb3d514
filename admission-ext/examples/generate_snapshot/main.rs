//! Writes a made-up cluster for `gpu-migrate-extender --snapshot`: `cargo run -p gpu-migrate-admission-ext --example
//! generate_snapshot -- --nodes 100 > cluster.json`.

mod cluster;

use clap::Parser as _;

#[derive(clap::Parser)]
struct Args {
    #[command(flatten)]
    shape: cluster::Shape,
}

fn main() -> std::io::Result<()> {
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    cluster::write(Args::parse().shape, &mut out)?;
    std::io::Write::flush(&mut out)
}

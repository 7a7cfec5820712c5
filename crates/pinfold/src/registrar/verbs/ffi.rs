//! What libibverbs and its callers pass to each other: our own declarations of its structures,
//! under its own names.
//!
//! The library promises never to change their beginnings; versions 1.1 (2007) and later agree on
//! every field below. Only what Pinfold reads or writes is spelled out. What follows a last field
//! here may be longer in memory: none of these structures that the library allocates is ever made,
//! copied or measured by us.
//!
//! The tests of this file compare every offset with the C headers, where the machine has them.

#![allow(non_camel_case_types, missing_docs)]

use libc::{c_char, c_int, c_uint, c_void, size_t};

/// Opaque: only its name is asked for, and that through a function.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_device {
    _opaque: [u8; 0],
}

/// A completion channel: its descriptor becomes readable with a completion.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: c_int,
    pub refcnt: c_int,
}

/// Opaque: Pinfold uses no shared receive queues.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_srq {
    _opaque: [u8; 0],
}

/// Where the operations lie that the header calls without a function of the library.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_context_ops {
    _compat_1: [*mut c_void; 7],
    _memory_windows: [*mut c_void; 3],
    _compat_create_cq: *mut c_void,
    pub poll_cq:
        Option<unsafe extern "C" fn(cq: *mut ibv_cq, num_entries: c_int, wc: *mut ibv_wc) -> c_int>,
    pub req_notify_cq:
        Option<unsafe extern "C" fn(cq: *mut ibv_cq, solicited_only: c_int) -> c_int>,
    _compat_2: [*mut c_void; 7],
    pub post_srq_recv: *mut c_void,
    _compat_3: [*mut c_void; 4],
    pub post_send: Option<
        unsafe extern "C" fn(
            qp: *mut ibv_qp,
            wr: *mut ibv_send_wr,
            bad_wr: *mut *mut ibv_send_wr,
        ) -> c_int,
    >,
    pub post_recv: Option<
        unsafe extern "C" fn(
            qp: *mut ibv_qp,
            wr: *mut ibv_recv_wr,
            bad_wr: *mut *mut ibv_recv_wr,
        ) -> c_int,
    >,
    _compat_4: [*mut c_void; 5],
}

/// An opened device.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: PthreadMutex,
    /// [`ABI_IS_EXTENDED`] where the context lies at the end of a [`verbs_context`].
    pub abi_compat: *mut c_void,
}

/// What `abi_compat` holds in a context with extended operations, as an address.
pub const ABI_IS_EXTENDED: usize = usize::MAX;

/// `pthread_mutex_t`, which stands in the middle of some structures.
#[repr(C)]
pub struct PthreadMutex(libc::pthread_mutex_t);

impl std::fmt::Debug for PthreadMutex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("pthread_mutex_t")
    }
}

/// The extended operations. The structure grows at its front, and its end is an [`ibv_context`];
/// so a field is there if its distance to the end is not more than `sz`.
#[repr(C)]
#[derive(Debug)]
pub struct verbs_context {
    pub query_port: Option<
        unsafe extern "C" fn(
            context: *mut ibv_context,
            port_num: u8,
            port_attr: *mut ibv_port_attr,
            port_attr_len: size_t,
        ) -> c_int,
    >,
    pub advise_mr: Option<
        unsafe extern "C" fn(
            pd: *mut ibv_pd,
            advice: c_uint,
            flags: u32,
            sg_list: *mut ibv_sge,
            num_sge: u32,
        ) -> c_int,
    >,
    _between_1: [*mut c_void; 25],
    pub query_device_ex: Option<
        unsafe extern "C" fn(
            context: *mut ibv_context,
            input: *const ibv_query_device_ex_input,
            attr: *mut ibv_device_attr_ex,
            attr_size: size_t,
        ) -> c_int,
    >,
    _between_2: [*mut c_void; 10],
    _abi_placeholder3: u64,
    pub sz: size_t,
    pub context: ibv_context,
}

/// A protection domain.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_pd {
    pub context: *mut ibv_context,
    pub handle: u32,
}

/// A memory region.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: size_t,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

pub const IBV_ACCESS_LOCAL_WRITE: c_uint = 1;
pub const IBV_ACCESS_REMOTE_WRITE: c_uint = 1 << 1;
pub const IBV_ACCESS_REMOTE_READ: c_uint = 1 << 2;
pub const IBV_ACCESS_REMOTE_ATOMIC: c_uint = 1 << 3;
/// Everything that a peer may be let do by key.
pub const IBV_ACCESS_REMOTE: c_uint =
    IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
pub const IBV_ACCESS_MW_BIND: c_uint = 1 << 4;
pub const IBV_ACCESS_ZERO_BASED: c_uint = 1 << 5;
pub const IBV_ACCESS_ON_DEMAND: c_uint = 1 << 6;
pub const IBV_ACCESS_HUGETLB: c_uint = 1 << 7;
/// The first of the flags that a device may ignore.
pub const IBV_ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;
/// All flags that a device may ignore; `ibv_reg_mr_iova2` clears them for kernels that know none.
pub const IBV_ACCESS_OPTIONAL_RANGE: c_uint = 0x3ff0_0000;

pub const IBV_REREG_MR_CHANGE_TRANSLATION: c_int = 1;

pub const IBV_ADVISE_MR_ADVICE_PREFETCH: c_uint = 0;
pub const IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE: c_uint = 1;
pub const IBV_ADVISE_MR_FLAG_FLUSH: u32 = 1;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_device_attr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_uint,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

#[repr(C)]
#[derive(Debug)]
pub struct ibv_query_device_ex_input {
    pub comp_mask: u32,
}

pub const IBV_ODP_SUPPORT: u64 = 1;
pub const IBV_ODP_SUPPORT_IMPLICIT: u64 = 1 << 1;

pub const IBV_ODP_SUPPORT_SEND: u32 = 1;
pub const IBV_ODP_SUPPORT_RECV: u32 = 1 << 1;
pub const IBV_ODP_SUPPORT_WRITE: u32 = 1 << 2;
pub const IBV_ODP_SUPPORT_READ: u32 = 1 << 3;
pub const IBV_ODP_SUPPORT_ATOMIC: u32 = 1 << 4;
pub const IBV_ODP_SUPPORT_SRQ_RECV: u32 = 1 << 5;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_odp_caps {
    pub general_caps: u64,
    pub rc_odp_caps: u32,
    pub uc_odp_caps: u32,
    pub ud_odp_caps: u32,
}

/// The extended attributes. The library is told the size and fills that much.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_device_attr_ex {
    pub orig_attr: ibv_device_attr,
    pub comp_mask: u32,
    pub odp_caps: ibv_odp_caps,
    /// All that stands between the capabilities on demand and the last fields of version 44.
    pub others: [u64; 16],
    pub xrc_odp_caps: u32,
    pub phys_port_cnt_ex: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_port_attr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

pub const IBV_PORT_ACTIVE: c_uint = 4;
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;

/// A port's address.
#[repr(C, align(8))]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct ibv_gid {
    pub raw: [u8; 16],
}

/// A completion queue; the library's own part follows.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_cq {
    pub context: *mut ibv_context,
}

/// A queue pair; the library's own part follows.
#[repr(C)]
#[derive(Debug)]
pub struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: c_uint,
    pub qp_type: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct ibv_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

pub const IBV_QPT_RC: c_uint = 2;

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct ibv_global_route {
    pub dgid: ibv_gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct ibv_qp_attr {
    pub qp_state: c_uint,
    pub cur_qp_state: c_uint,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

pub const IBV_QPS_RESET: c_uint = 0;
pub const IBV_QPS_INIT: c_uint = 1;
pub const IBV_QPS_RTR: c_uint = 2;
pub const IBV_QPS_RTS: c_uint = 3;
pub const IBV_QPS_SQD: c_uint = 4;
pub const IBV_QPS_SQE: c_uint = 5;
pub const IBV_QPS_ERR: c_uint = 6;

pub const IBV_QP_STATE: c_int = 1;
pub const IBV_QP_ACCESS_FLAGS: c_int = 1 << 3;
pub const IBV_QP_PKEY_INDEX: c_int = 1 << 4;
pub const IBV_QP_PORT: c_int = 1 << 5;
pub const IBV_QP_AV: c_int = 1 << 7;
pub const IBV_QP_PATH_MTU: c_int = 1 << 8;
pub const IBV_QP_TIMEOUT: c_int = 1 << 9;
pub const IBV_QP_RETRY_CNT: c_int = 1 << 10;
pub const IBV_QP_RNR_RETRY: c_int = 1 << 11;
pub const IBV_QP_RQ_PSN: c_int = 1 << 12;
pub const IBV_QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub const IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub const IBV_QP_SQ_PSN: c_int = 1 << 16;
pub const IBV_QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub const IBV_QP_DEST_QPN: c_int = 1 << 20;

/// One piece of memory in a work request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    pub imm_data: u32,
    /// `wr.rdma`, the first of a union of three.
    pub remote_addr: u64,
    pub rkey: u32,
    /// What the union's longest member has behind `wr.rdma`, and the two unions behind it.
    pub others: [u64; 9],
}

pub const IBV_WR_RDMA_WRITE: c_uint = 0;
pub const IBV_WR_SEND: c_uint = 2;
pub const IBV_WR_RDMA_READ: c_uint = 4;
pub const IBV_SEND_SIGNALED: c_uint = 1 << 1;

#[repr(C)]
#[derive(Debug)]
pub struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

/// A work completion.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct ibv_wc {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

pub const IBV_WC_SUCCESS: c_uint = 0;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::io::Write;
    use std::mem::{align_of, offset_of, size_of};
    use std::path::Path;
    use std::process::{Command, Stdio};

    /// Sizes, and the offsets of what is read or written, as the C compiler names them.
    macro_rules! layout {
        ($($structure:ident { $($field:ident),* })*) => {
            [$(
                (concat!("sizeof(struct ", stringify!($structure), ")"), size_of::<$structure>()),
                $((
                    concat!("offsetof(struct ", stringify!($structure), ", ", stringify!($field), ")"),
                    offset_of!($structure, $field),
                ),)*
            )*]
        };
    }

    /// Everything that is passed whole, and everything that is read in place.
    fn ours() -> Vec<(&'static str, usize)> {
        let whole = layout! {
            ibv_context_ops { poll_cq, req_notify_cq, post_srq_recv, post_send, post_recv }
            ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, abi_compat }
            verbs_context { query_port, advise_mr, query_device_ex, sz, context }
            ibv_mr { context, pd, addr, length, handle, lkey, rkey }
            ibv_pd { context, handle }
            ibv_device_attr { max_mr_size, page_size_cap, max_qp, max_mr, atomic_cap, phys_port_cnt }
            ibv_device_attr_ex { comp_mask, odp_caps, xrc_odp_caps, phys_port_cnt_ex }
            ibv_odp_caps { general_caps }
            ibv_port_attr { state, active_mtu, gid_tbl_len, lid, link_layer, port_cap_flags2 }
            ibv_qp_init_attr { send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
            ibv_qp_cap { max_inline_data }
            ibv_qp_attr {
                path_mtu, dest_qp_num, qp_access_flags, ah_attr, sq_draining, port_num, rate_limit
            }
            ibv_ah_attr { dlid, is_global, port_num }
            ibv_global_route { sgid_index, hop_limit }
            ibv_sge { addr, length, lkey }
            ibv_send_wr { sg_list, num_sge, opcode, send_flags }
            ibv_recv_wr { next, sg_list, num_sge }
            ibv_wc { status, byte_len, qp_num }
            ibv_comp_channel { context, fd, refcnt }
        };
        let mut all = whole.to_vec();
        all.push(("sizeof(union ibv_gid)", size_of::<ibv_gid>()));
        all.push(("_Alignof(union ibv_gid)", align_of::<ibv_gid>()));
        all.push(("offsetof(struct ibv_qp, qp_num)", offset_of!(ibv_qp, qp_num)));
        all.push(("offsetof(struct ibv_send_wr, wr.rdma.rkey)", offset_of!(ibv_send_wr, rkey)));
        all
    }

    /// The same expressions, computed by the C compiler from the machine's own headers.
    fn theirs(expressions: &[(&str, usize)]) -> Option<HashMap<String, usize>> {
        let directory = std::env::temp_dir().join(format!("pinfold-layout-{}", std::process::id()));
        std::fs::create_dir_all(&directory).ok()?;
        let output = run(&source(expressions), &directory.join("layout"));
        let _left_behind = std::fs::remove_dir_all(&directory);
        let line = |line: &str| {
            let (value, expression) = line.split_once(' ')?;
            Some((expression.to_owned(), value.parse().ok()?))
        };
        output?.lines().map(line).collect()
    }

    /// A program in C that prints the values of `expressions`.
    fn source(expressions: &[(&str, usize)]) -> String {
        let head = "#include <stdio.h>\n#include <stddef.h>\n#include <infiniband/verbs.h>\n";
        let print = |expression| {
            format!("printf(\"%zu %s\\n\", (size_t){expression}, \"{expression}\");\n")
        };
        let body: String = expressions.iter().map(|(expression, _)| print(*expression)).collect();
        format!("{head}int main() {{\n{body}}}\n")
    }

    /// What the C program `source` prints, compiled as `program`.
    fn run(source: &str, program: &Path) -> Option<String> {
        let mut compiler = Command::new("cc")
            .args(["-x", "c", "-", "-o"])
            .arg(program)
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        // A compiler that misses the headers may end before it has read all.
        let _unread = compiler.stdin.take()?.write_all(source.as_bytes());
        compiler.wait().ok()?.success().then_some(())?;
        String::from_utf8(Command::new(program).output().ok()?.stdout).ok()
    }

    #[test]
    fn every_offset_is_that_of_the_c_headers() {
        let ours = ours();
        let Some(theirs) = theirs(&ours) else {
            eprintln!("skipped: no C compiler that finds infiniband/verbs.h");
            return;
        };
        for (expression, value) in ours {
            assert_eq!(Some(&value), theirs.get(expression), "{expression}");
        }
    }

    #[cfg(target_pointer_width = "64")]
    #[test]
    fn structures_have_the_sizes_of_version_44() {
        assert_eq!(size_of::<ibv_context>(), 328);
        assert_eq!(size_of::<verbs_context>(), 648);
        assert_eq!(size_of::<ibv_device_attr>(), 232);
        assert_eq!(size_of::<ibv_device_attr_ex>(), 400);
        assert_eq!(size_of::<ibv_qp_attr>(), 144);
        assert_eq!(size_of::<ibv_send_wr>(), 128);
        assert_eq!(size_of::<ibv_wc>(), 48);
        assert_eq!(offset_of!(ibv_context_ops, post_send), 200);
        assert_eq!(offset_of!(verbs_context, query_device_ex), 216);
    }
}

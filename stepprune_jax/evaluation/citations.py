"""Returns the BibTeX entries of the papers that propose pruning methods."""

from collections.abc import Iterable
from typing import NamedTuple

from stepprune_jax.registry import PRUNERS


class Paper(NamedTuple):
    """The paper of a pruning method.

    Attributes:
        key: BibTeX key.
        authors: names in BibTeX's format, joined by " and ".
        title: the title.
        arxiv: arXiv identifier, whose first two digits are the year.
        venue: conference with the year, such as "CVPR 2025"; empty for a preprint.
    """

    key: str
    authors: str
    title: str
    arxiv: str
    venue: str = ""

    def bibtex(self) -> str:
        """Returns the BibTeX entry. Braces keep the capitals of the title."""
        fields = {"title": f"{{{self.title}}}", "author": self.authors}
        if self.venue:
            kind, (name, _, year) = "inproceedings", self.venue.rpartition(" ")
            fields |= {"booktitle": name, "year": year}
        else:
            kind, year = "article", f"20{self.arxiv[:2]}"
            fields |= {"journal": f"arXiv preprint arXiv:{self.arxiv}", "year": year}
        fields |= {"eprint": self.arxiv, "archiveprefix": "arXiv"}
        lines = ",\n".join(f"  {name:<13} = {{{value}}}" for name, value in fields.items())
        return f"@{kind}{{{self.key},\n{lines}\n}}\n"


_SPARSEVLM = Paper(
    "zhang2025sparsevlm",
    "Zhang, Yuan and Fan, Chun-Kai and Ma, Junpeng and Zheng, Wenzhao and Huang, Tao and "
    "Cheng, Kuan and Gudovskiy, Denis and Okuno, Tomoyuki and Nakata, Yohei and Keutzer, Kurt and "
    "Zhang, Shanghang",
    "SparseVLM: Visual Token Sparsification for Efficient Vision-Language Model Inference",
    "2410.04417",
    "International Conference on Machine Learning (ICML) 2025",
)
_PRUMERGE = Paper(
    "shang2025prumerge",
    "Shang, Yuzhang and Cai, Mu and Xu, Bingxin and Lee, Yong Jae and Yan, Yan",
    "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models",
    "2403.15388",
    "IEEE/CVF International Conference on Computer Vision (ICCV) 2025",
)
_CVPR_2025 = "IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR) 2025"
_NEURIPS_2025 = "Advances in Neural Information Processing Systems (NeurIPS) 2025"
# Papers by name of the method in `PRUNERS`. Baselines without a paper have no entry.
PAPERS = {
    "downsample": Paper(
        "liao2025vtcbench",
        "Liao, Chenfei and Wang, Wensong and Wen, Zichen and Zheng, Xu and Wang, Yiyu and "
        "He, Haocong and Lyu, Yuanhuiyi and Jiang, Lutao and Zou, Xin and Fu, Yuqian and "
        "Ren, Bin and Zhang, Linfeng and Hu, Xuming",
        "Are We Using the Right Benchmark: An Evaluation Framework for Visual Token Compression "
        "Methods",
        "2510.07143",
    ),
    "fastv": Paper(
        "chen2024fastv",
        "Chen, Liang and Zhao, Haozhe and Liu, Tianyu and Bai, Shuai and Lin, Junyang and "
        "Zhou, Chang and Chang, Baobao",
        "An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for "
        "Large Vision-Language Models",
        "2403.06764",
        "European Conference on Computer Vision (ECCV) 2024",
    ),
    "clse": Paper(
        "chen2026clse",
        "Chen, Bin and Cai, Yuxiang and Luo, Yadan and others",
        "Spectral Evolution-Guided Token Pruning in Multimodal Large Language Models",
        "2606.24165",
        "European Conference on Computer Vision (ECCV) 2026",
    ),
    "sparsevlm": _SPARSEVLM,
    "sparsevlm_v2": _SPARSEVLM,
    "pyramiddrop": Paper(
        "xing2025pyramiddrop",
        "Xing, Long and Huang, Qidong and Dong, Xiaoyi and Lu, Jiajie and Zhang, Pan and "
        "Zang, Yuhang and Cao, Yuhang and He, Conghui and Wang, Jiaqi and Wu, Feng and "
        "Lin, Dahua",
        "PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy "
        "Reduction",
        "2410.17247",
        _CVPR_2025,
    ),
    "dart": Paper(
        "wen2025dart",
        "Wen, Zichen and Gao, Yifeng and Wang, Shaobo and Zhang, Junyuan and Zhang, Qintong and "
        "Li, Weijia and He, Conghui and Zhang, Linfeng",
        "Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More",
        "2502.11494",
        "Conference on Empirical Methods in Natural Language Processing (EMNLP) 2025",
    ),
    "topv": Paper(
        "yang2025topv",
        "Yang, Cheng and Sui, Yang and Xiao, Jinqi and Huang, Lingyi and Gong, Yu and Li, Chendi "
        "and Yan, Jinghua and Bai, Yu and Sadayappan, Ponnuswamy and Hu, Xia and Yuan, Bo",
        "TopV: Compatible Token Pruning with Inference Time Optimization for Fast and Low-Memory "
        "Multimodal Vision Language Model",
        "2503.18278",
        _CVPR_2025,
    ),
    "visionzip": Paper(
        "yang2025visionzip",
        "Yang, Senqiao and Chen, Yukang and Tian, Zhuotao and Wang, Chengyao and Li, Jingyao and "
        "Yu, Bei and Jia, Jiaya",
        "VisionZip: Longer is Better but Not Necessary in Vision Language Models",
        "2412.04467",
        _CVPR_2025,
    ),
    "prumerge": _PRUMERGE,
    "prumerge_plus": _PRUMERGE,
    "holov": Paper(
        "zou2025holov",
        "Zou, Xin and Lu, Di and Wang, Yizhou and Yan, Yibo and Lyu, Yuanhuiyi and Zheng, Xu and "
        "Zhang, Linfeng and Hu, Xuming",
        "Don't Just Chase ``Highlighted Tokens'' in MLLMs: Revisiting Visual Holistic Context "
        "Retention",
        "2510.02912",
        _NEURIPS_2025,
    ),
    "hiprune": Paper(
        "liu2025hiprune",
        "Liu, Jizhihui and others",
        "HiPrune: Training-Free Visual Token Pruning via Hierarchical Attention in Vision-Language "
        "Models",
        "2508.00553",
    ),
    "divprune": Paper(
        "alvar2025divprune",
        "Alvar, Saeed Ranjbar and Singh, Gursimran and Akbari, Mohammad and Zhang, Yong",
        "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models",
        "2503.02175",
        _CVPR_2025,
    ),
    "cdpruner": Paper(
        "zhang2025cdpruner",
        "Zhang, Qizhe and Liu, Mengzhen and Li, Lichen and Lu, Ming and Zhang, Yuan and "
        "Pan, Junwen and She, Qi and Zhang, Shanghang",
        "Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in "
        "MLLMs",
        "2506.10967",
        _NEURIPS_2025,
    ),
    "mmtok": Paper(
        "dong2026mmtok",
        "Dong, Sixun and Hu, Juhua and Zhang, Mian and Yin, Ming and Fu, Yanjie and Qian, Qi",
        "MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs",
        "2508.18264",
        "International Conference on Learning Representations (ICLR) 2026",
    ),
    "evs": Paper(
        "bagrov2025evs",
        "Bagrov, Natan and Khvedchenia, Eugene and Tymchenko, Borys and Aharon, Shay and "
        "Kadoch, Lior and Keren, Tomer and Masad, Ofri and Geifman, Yonatan and "
        "Zilberstein, Ran and Rintamaki, Tuomas and Le, Matthieu and Tao, Andrew",
        "Efficient Video Sampling: Pruning Temporally Redundant Tokens for Faster VLM Inference",
        "2510.14624",
    ),
    "vidcom2": Paper(
        "liu2025vidcom2",
        "Liu, Xuyang and Wang, Yiyu and Ma, Junpeng and Zhang, Linfeng",
        "Video Compression Commander: Plug-and-Play Inference Acceleration for Video Large "
        "Language Models",
        "2505.14454",
        "Conference on Empirical Methods in Natural Language Processing (EMNLP) 2025",
    ),
    "vcast": Paper(
        "lin2026vcast",
        "Lin, Xinying and Liu, Xuyang and Wang, Yiyu and Ma, Teng and Ren, Wenqi",
        "V-CAST: Video Curvature-Aware Spatio-Temporal Pruning for Efficient Video Large "
        "Language Models",
        "2603.27650",
    ),
    "autoselect": Paper(
        "he2026autoselect",
        "He, Landi and Yang, Xiaoyu and Xu, Lijian",
        "The Model Knows Which Tokens Matter: Automatic Token Selection via Noise Gating",
        "2603.07135",
    ),
    "visionselector": Paper(
        "zhu2025visionselector",
        "Zhu, Jiaying and Zhu, Yurui and Lu, Xin and Yan, Wenrui and Li, Dong and Liu, Kunlin and "
        "Fu, Xueyang and Zha, Zheng-Jun",
        "VisionSelector: End-to-End Learnable Visual Token Compression for Efficient Multimodal "
        "LLMs",
        "2510.16598",
    ),
    "glimpseprune": Paper(
        "zeng2025glimpseprune",
        "Zeng, Quan-Sheng and Li, Yunheng and Wang, Qilong and Jiang, Peng-Tao and Wu, Zuxuan and "
        "Cheng, Ming-Ming and Hou, Qibin",
        "A Glimpse to Compress: Dynamic Visual Token Pruning for Large Vision-Language Models",
        "2508.01548",
    ),
    "stepprune": Paper(
        "he2026stepprune",
        "He, Landi and Young, Shawn and Xu, Lijian",
        "Stepwise Token Selection for Efficient Multimodal Large Language Models",
        "2606.16067",
    ),
}


def cite(row_names: Iterable[str]) -> str:
    """Returns the BibTeX entries of the methods of table rows, each once.

    Args:
        row_names: names of rows. A name that begins with the label of a method, such as
            "StepPrune, own stop", belongs to this method.

    Returns:
        The entries in the order of the rows, separated by empty lines. Rows without a paper, such
        as baselines and methods of the user, are comments.
    """
    blocks = []
    for row_name in row_names:
        # The longest label decides between labels such as "SparseVLM" and "SparseVLM v2".
        candidates = [method for method in PRUNERS.values() if row_name.startswith(method.label)]
        method = max(candidates, key=lambda method: len(method.label), default=None)
        paper = None if method is None else PAPERS.get(method.name)
        blocks.append(f"% {row_name}: no paper\n" if paper is None else paper.bibtex())
    return "\n".join(dict.fromkeys(blocks))
